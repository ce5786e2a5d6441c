"""Cross-attention text models (Mllama): encoder rows enter cross-attention blocks instead of the text sequence.

In a packed row each sample's tokens attend to the rows of that sample's images by the family's rule: text attends to
the last image before it. Samples without images skip these blocks, as they do when run alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dilatant.attention.context_parallel import ContextRanks
from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.attention.kernels.attention_plan import upload
from dilatant.models.mixed_class import mixed

STATES = "cross_attention_states"
"""The text model's keyword for encoder rows."""


@dataclass(frozen=True, slots=True)
class CrossAttentionRows:
    """Encoder rows of a packed row, passed in place of a padded batch's rows. lengths: tokens of each sample. seen: for
    each sample with images, its rows [1, rows, hidden] and the family's two masks: the additive mask [1, 1, tokens,
    rows], and 1 for tokens that attend to any row, [1, 1, tokens, 1]. unseen: rows that only tokens of other ranks
    attend to; they stay in the graph, because this rank must join the backward's collective."""

    lengths: tuple[int, ...]
    seen: tuple[tuple[Tensor, Tensor, Tensor] | None, ...]
    unseen: Tensor | None = None


def gather_rows(own: Tensor, of_rank: Sequence[NDArray[np.int64]], ranks: ContextRanks) -> Tensor:
    """All-gather the encoder rows of context-parallel ranks, [rows, hidden]; backward sums the gradients of all ranks.
    of_rank: the indices held by each rank (see `language.cross_attention`)."""
    return _GatherRows.apply(own, of_rank, ranks)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, of_rank: Sequence[NDArray[np.int64]], ranks: ContextRanks) -> Tensor:
        ctx.ranks, ctx.places = ranks, [upload(rows, own.device) for rows in of_rank]
        most = max(map(len, of_rank))
        parts = own.new_empty(len(of_rank), most, own.shape[1])
        padded = functional.pad(own, (0, 0, 0, most - len(own)))
        ranks.all_gather(parts, padded, "rows of an encoder of context-parallel ranks").wait()
        whole = own.new_empty(sum(map(len, of_rank)), own.shape[1])
        for places, part in zip(ctx.places, parts, strict=True):
            whole[places] = part[: len(places)]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        most = max(map(len, ctx.places))
        parts = gradient.new_zeros(len(ctx.places), most, gradient.shape[1], dtype=torch.float32)
        for places, part in zip(ctx.places, parts, strict=True):
            part[: len(places)] = gradient[places]
        own = parts.new_empty(parts.shape[1:])
        what = "gradients of an encoder's rows of context-parallel ranks"
        ctx.ranks.reduce_scatter(own, parts, what).wait()
        return own[: len(ctx.places[ctx.ranks.index])].to(gradient.dtype), None, None


def visible_tiles(ids: NDArray[np.int64], placeholder_id: int, tiles: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the tiles that each token attends to, bool [tokens, images, tiles]. They are those of the last image
    before it and of images directly adjacent before that one. tiles: [images, tiles], 1 for existing tiles.

    Raises ValueError if the text has more or fewer images.
    """
    places = np.flatnonzero(ids == placeholder_id)
    if len(places) != len(tiles):
        raise ValueError(f"{len(places)} images in the text, {len(tiles)} that were loaded")
    ends = np.append(places[1:], len(ids))
    for number in range(len(places) - 2, -1, -1):
        if places[number] + 1 == places[number + 1]:
            ends[number] = ends[number + 1]
    at = np.arange(len(ids))[:, None]
    return ((at >= places) & (at < ends))[..., None] & (tiles != 0)


def cross_layers(model: nn.Module) -> list[nn.Module]:
    """Return the cross-attention blocks of a model."""
    return [module for module in model.modules() if is_cross_attention(module)]


def is_cross_attention(block: nn.Module) -> bool:
    """Return True for a cross-attention block."""
    return hasattr(block, "cross_attn_attn_gate")


def accept_cross_rows(model: nn.Module) -> None:
    """Make the cross-attention of `model` accept `CrossAttentionRows`, with transformers' own SDPA attention."""
    for module in cross_layers(model):
        if not isinstance(module, _BySample):
            module.__class__ = mixed(cast(Any, type(module)), _BySample)
        attention: Any = cast(Any, module).cross_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "sdpa"


class _BySample:
    """Mixin for the class of a cross-attention block: runs each sample of a packed row by itself."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        run = cast(Any, super()).forward
        given = kwargs.pop(STATES, None)
        if not isinstance(given, CrossAttentionRows):
            return run(hidden_states, **{STATES: given, **kwargs})
        kwargs = {name: each for name, each in kwargs.items() if name not in _OF_ROWS}
        made = []
        for part, seen in zip(hidden_states.split(given.lengths, 1), given.seen, strict=True):
            if seen is None:
                made.append(part)
                continue
            rows, added, some = seen
            masks = {"cross_attention_mask": added, "full_text_row_masked_out_mask": some}
            made.append(run(part, attention_mask=None, **masks, **{STATES: rows}, **kwargs))
        hidden = torch.cat(made, 1)
        return hidden if given.unseen is None else hidden + 0 * given.unseen.sum()


_OF_ROWS = ("attention_mask", "cross_attention_mask", "full_text_row_masked_out_mask", PLAN_KEYWORD)
