"""The rule of `mask.visible` for tensors of words, shared by every backend written in PyTorch."""

from __future__ import annotations

import torch

from dilatant.attention.masks import mask as layout


def visible_pairs(
    query_fields: torch.Tensor,
    key_fields: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return whether queries see keys, elementwise: bool of the common shape to which the arguments broadcast."""
    differing = query_fields ^ key_fields
    same_instance = (differing & layout.INSTANCE) == 0
    alike = (query_fields & key_fields & layout.OWN) != 0
    together = ((query_fields & layout.TOGETHER) != 0) & alike & same_instance
    attended = ((query_fields >> layout.ATTEND_SHIFT) & key_fields & layout.OWN) != 0
    behind = query_positions - key_positions
    causal = (query_fields & layout.CAUSAL) != 0
    seen = (attended & (~causal | (behind >= 0))) | together
    seen = seen & ((differing & layout.SAMPLE) == 0)
    seen = seen & (((query_fields & layout.LOCAL) == 0) | same_instance)
    if window is not None:
        inside = (behind < window) & (causal | (behind > -window))
        seen = seen & (((query_fields & layout.WINDOW) == 0) | inside)
    return seen
