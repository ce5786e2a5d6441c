"""Entrain (thesis chapter 4)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.papers.entrain import execution, modes, stability
from benchmarks.papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    return [*stability.tables(shared), *modes.tables(shared), *execution.tables(shared)]
