"""Planning runs on a laptop: importing the room loads neither torch nor a compiler."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_room_loads_neither_torch_nor_numba():
    program = "import dilatant.plan, sys; print({'torch', 'numba', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
