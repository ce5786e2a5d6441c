"""Bitfield attention: masks in 64 bits per token, block tables, kernels, and placement on context-parallel ranks.

Names that need torch are imported on first use, so that masks and placement can be planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilatant.attention.masks.blocks import block_table as block_table
from dilatant.attention.masks.blocks import block_workloads as block_workloads
from dilatant.attention.masks.mask import AttentionMask as AttentionMask
from dilatant.attention.masks.mask import visible as visible
from dilatant.attention.masks.packing import RowLayout as RowLayout
from dilatant.attention.masks.packing import document_causal as document_causal
from dilatant.attention.masks.packing import media_mask as media_mask
from dilatant.attention.masks.placement import place_blocks as place_blocks
from dilatant.config.lazy import lazy_names

if TYPE_CHECKING:
    from dilatant.attention.hook import use_dilatant_attention as use_dilatant_attention
    from dilatant.attention.kernels.attention_plan import AttentionPlan as AttentionPlan
    from dilatant.attention.kernels.packed_attention import attention as attention

__getattr__, _ = lazy_names(
    __name__,
    {
        "hook": "use_dilatant_attention",
        "kernels.attention_plan": "AttentionPlan",
        "kernels.packed_attention": "attention",
    },
)
