"""DistTrain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.papers.disttrain import orchestration, reordering
from benchmarks.papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> Iterator[PaperTable]:
    if not (shared / "data/workload_stats").exists():
        return
    if timed:
        yield orchestration.orchestration_time(shared)
    yield reordering.tensor_overlap()
    yield reordering.preprocessing()
    yield orchestration.orchestration_gain(shared)
    yield reordering.reordering_gain(shared)
    yield orchestration.frozen_training(shared)
    yield orchestration.large_scale(shared)
