"""DistTrain."""

from __future__ import annotations

from pathlib import Path

from papers import disttrain_orchestration, disttrain_reordering
from papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    if not (shared / "data/workload_stats").exists():
        return []
    return [
        *([disttrain_orchestration.orchestration_time(shared)] if timed else []),
        disttrain_orchestration.large_scale(shared),
        disttrain_orchestration.orchestration_gain(shared),
        disttrain_orchestration.frozen_training(shared),
        disttrain_reordering.reordering_gain(shared),
        disttrain_reordering.tensor_overlap(),
        disttrain_reordering.untestable(),
    ]
