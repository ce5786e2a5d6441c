"""DistTrain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from papers import disttrain_orchestration, disttrain_reordering
from papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> Iterator[PaperTable]:
    if not (shared / "data/workload_stats").exists():
        return
    if timed:
        yield disttrain_orchestration.orchestration_time(shared)
    yield disttrain_reordering.tensor_overlap()
    yield disttrain_reordering.preprocessing()
    yield disttrain_orchestration.orchestration_gain(shared)
    yield disttrain_reordering.reordering_gain(shared)
    yield disttrain_orchestration.frozen_training(shared)
    yield disttrain_orchestration.large_scale(shared)
