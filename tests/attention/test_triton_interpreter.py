"""The Triton kernels equal dense attention, run by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernels' results were not checked")
HERE = Path(__file__).parent


@pytest.mark.parametrize("checks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_dense_attention(checks: str) -> None:
    import numpy as np
    import triton

    has_old_triton = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
    if has_old_triton and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            f"the interpreter of Triton {triton.__version__} fails on numpy 2.4: the kernels' results were not checked"
        )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            checks,
            str(HERE / "interpreter_checks.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
