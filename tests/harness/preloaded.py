"""Imports for the fork server of test ranks: all that ranks need, also what transformers imports to build a model, and
the compiled attention kernels (those of schedules: `dilatant.schedule.loaded_kernels`)."""

from __future__ import annotations

import gc

from cases.engine_case import CASE, build_model
from dilatant.attention.masks.blocks import block_table
from dilatant.attention.masks.packing import RowLayout, document_causal
from dilatant.attention.masks.placement import place_row
from harness.checked_steps import check_case as check_case


def _load() -> None:
    build_model(CASE, "meta")
    mask = document_causal(RowLayout.of_lengths([9, 23]))
    block_table(mask, 8).transposed()
    place_row(mask, 3)


_load()
gc.collect()
gc.freeze()  # else the collector of each rank visits all these objects and copies their pages into the rank's memory
