"""Parameters of which the default run takes those that differ in kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(names: Iterable[str], *kept: str) -> list[Any]:
    """Return the names as parameters, all of them slow but those that are `kept`."""
    names = [*names]
    assert {*kept} <= {*names}
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in names]
