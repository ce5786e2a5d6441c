"""How long tests wait for what should happen: until it happens.

A limit is for what hangs. Machines are slow, and busy with other things: no test fails by that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_SECONDS = 600.0
"""What takes longer hangs."""


def wait_until(happened: Callable[[], object], said: Callable[[], object] = lambda: "nothing happened") -> None:
    """Return once `happened()` is true. said: what an error tells, after HANG_SECONDS."""
    deadline = time.monotonic() + HANG_SECONDS
    while not happened():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)
