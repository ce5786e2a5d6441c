"""Cornstarch (thesis chapter 3, and the ICML text)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.papers.cornstarch import modes, partition, version_3
from benchmarks.papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    return [
        partition.frozen_passes(),
        partition.stage_times_replayed(),
        partition.factors_from_shapes(),
        modes.modes(),
        modes.context_parallel(),
        modes.untestable(),
        version_3.frozen_balance(),
        version_3.long_rows(),
        version_3.untold(),
    ]
