"""Entrain (thesis chapter 4)."""

from __future__ import annotations

from pathlib import Path

from papers import entrain_execution, entrain_modes, entrain_stability
from papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    return [*entrain_stability.tables(shared), *entrain_modes.tables(shared), *entrain_execution.tables(shared)]
