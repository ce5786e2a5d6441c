"""Where the data sets are that are too large, or not ours, to keep in the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("DILATANT_SHARED", Path(__file__).resolve().parents[3] / "shared"))


def need(relative: str, unchecked: str) -> Path:
    """The path of a shared file or folder; skips the test, saying what is left unchecked, where it is absent."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"{relative} is absent; not checked: {unchecked}")
    return path
