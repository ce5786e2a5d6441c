"""Bitfield attention: masks in 64 bits a token, block tables, kernels, and placement on context-parallel ranks.

Names below are resolved on first use, so that masks and placement can be planned without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dilatant.attention.attention_plan import AttentionPlan as AttentionPlan
    from dilatant.attention.backends import explain_backend as explain_backend
    from dilatant.attention.blocks import BlockCost as BlockCost
    from dilatant.attention.blocks import BlockTable as BlockTable
    from dilatant.attention.blocks import block_table as block_table
    from dilatant.attention.blocks import block_workloads as block_workloads
    from dilatant.attention.context_parallel import ContextParallelRow as ContextParallelRow
    from dilatant.attention.context_parallel import context_parallel_attention as context_parallel_attention
    from dilatant.attention.hook import use_dilatant_attention as use_dilatant_attention
    from dilatant.attention.kernels import attention as attention
    from dilatant.attention.mask import AttentionMask as AttentionMask
    from dilatant.attention.mask import MaskError as MaskError
    from dilatant.attention.mask import visible as visible
    from dilatant.attention.packing import RowLayout as RowLayout
    from dilatant.attention.packing import Segment as Segment
    from dilatant.attention.packing import build_mask as build_mask
    from dilatant.attention.placement import Placement as Placement
    from dilatant.attention.placement import place_blocks as place_blocks

_HOME = {
    "AttentionError": "scores",
    "AttentionMask": "mask",
    "AttentionPlan": "attention_plan",
    "BlockCost": "blocks",
    "BlockTable": "blocks",
    "MaskError": "mask",
    "RowLayout": "packing",
    "Placement": "placement",
    "Segment": "packing",
    "ContextParallelRow": "context_parallel",
    "attention": "kernels",
    "context_parallel_attention": "context_parallel",
    "explain_backend": "backends",
    "use_dilatant_attention": "hook",
    "block_table": "blocks",
    "block_workloads": "blocks",
    "build_mask": "packing",
    "place_blocks": "placement",
    "visible": "mask",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
