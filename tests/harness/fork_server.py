"""The fork server of a process of tests, with all that ranks of tests import.

It is what the first to need it starts, with what that one preloads: a test of a part of the program would have every
later rank import the rest, for seconds each.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

PRELOAD = ("pytest", "hypothesis", "harness.preloaded")


def start_fork_server() -> None:
    """Start it, if there is none yet; its imports run in parallel to the caller."""
    from dilatant.comm.fork_server import RANK_PRELOAD, warm_up

    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, PYTHONPATH=path):
        warm_up((*RANK_PRELOAD, *PRELOAD))
