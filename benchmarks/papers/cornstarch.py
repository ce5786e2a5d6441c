"""Cornstarch (thesis chapter 3, and the ICML text)."""

from __future__ import annotations

from pathlib import Path

from papers import cornstarch_modes, cornstarch_partition, cornstarch_v3
from papers.tables import PaperTable


def tables(shared: Path, timed: bool = True) -> list[PaperTable]:
    return [
        cornstarch_partition.frozen_passes(),
        cornstarch_partition.stage_times_replayed(),
        cornstarch_partition.factors_from_shapes(),
        cornstarch_modes.modes(),
        cornstarch_modes.context_parallel(),
        cornstarch_modes.untestable(),
        cornstarch_v3.frozen_balance(),
        cornstarch_v3.long_rows(),
        cornstarch_v3.untold(),
    ]
