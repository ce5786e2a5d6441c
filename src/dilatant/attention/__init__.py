"""Bitfield attention: masks in 64 bits per token, block tables, kernels, and placement on context-parallel ranks.

The names below are imported on first use, so that masks and placement can be planned without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.attention.hook import use_dilatant_attention as use_dilatant_attention
    from dilatant.attention.kernels.attention_plan import AttentionPlan as AttentionPlan
    from dilatant.attention.kernels.packed_attention import attention as attention
    from dilatant.attention.masks.blocks import block_table as block_table
    from dilatant.attention.masks.blocks import block_workloads as block_workloads
    from dilatant.attention.masks.mask import AttentionMask as AttentionMask
    from dilatant.attention.masks.mask import visible as visible
    from dilatant.attention.masks.packing import RowLayout as RowLayout
    from dilatant.attention.masks.packing import document_causal as document_causal
    from dilatant.attention.masks.packing import media_mask as media_mask
    from dilatant.attention.masks.placement import place_blocks as place_blocks

_HOME = {
    "AttentionMask": "masks.mask",
    "AttentionPlan": "kernels.attention_plan",
    "RowLayout": "masks.packing",
    "attention": "kernels.packed_attention",
    "block_table": "masks.blocks",
    "block_workloads": "masks.blocks",
    "document_causal": "masks.packing",
    "media_mask": "masks.packing",
    "place_blocks": "masks.placement",
    "use_dilatant_attention": "hook",
    "visible": "masks.mask",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
