"""Entrain (thesis chapter 4)."""

from __future__ import annotations

from pathlib import Path

from papers import entrain_execution, entrain_stability
from papers.tables import PaperTable


def tables(shared: Path) -> list[PaperTable]:
    return [*entrain_stability.tables(shared), *entrain_execution.tables(shared)]
