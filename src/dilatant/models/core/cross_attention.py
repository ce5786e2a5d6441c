"""Cross-attention text models (Mllama): encoder rows enter cross-attention blocks instead of the text sequence.

In a packed row each sample's tokens attend to the rows of that sample's images by the family's rule: text attends to
the last image before it. Samples without images skip these blocks, as they do when run alone. Encoder rows that later
stages need are sent after the tokens of their sample; plans do not represent them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dilatant.attention.context_parallel import ContextParallelRow, ContextRanks
from dilatant.attention.hook import PLAN_KEYWORD
from dilatant.data.media_units.aspect_image_unit import TILES
from dilatant.data.sample import EncodedSample

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


@dataclass(frozen=True, slots=True)
class CrossAttentionLayout:
    """Cross-attention layout of a model. unit: the encoder. blocks: the cross-attention blocks, numbered in the whole
    model. rows_of_tile: encoder rows of each image tile."""

    unit: str
    placeholder_id: int
    blocks: tuple[int, ...]
    rows_of_tile: int

    def passes(self, block: int) -> bool:
        """Return True if a stage that begins at `block`, or a later one, needs encoder rows."""
        return any(own >= block for own in self.blocks)

    def count(self, sample: EncodedSample) -> int:
        """Return the number of encoder rows of a sample."""
        return sample.sizes.get(self.unit, 0)

    def split(self, arrived: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Separate tokens and encoder rows of [tokens + rows, hidden], where each sample's rows follow its tokens."""
        is_row = _is_row(lengths, rows).to(arrived.device)
        return arrived[~is_row], arrived[is_row]

    def join(self, hidden: Tensor, rows: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Interleave tokens and encoder rows (the inverse of `split`)."""
        order = torch.argsort(_is_row(lengths, counts), stable=True).argsort()
        return torch.cat([hidden, rows])[order.to(hidden.device)]

    def token_of_rows(self, sample: EncodedSample, tokens: int) -> NDArray[np.int64]:
        """Assign each encoder row of a sample to a token, evenly; the token's context-parallel rank holds the row."""
        rows = self.count(sample)
        return np.arange(rows) * tokens // max(1, rows)

    def divide(
        self, samples: Sequence[EncodedSample], lengths: Sequence[int], share: ContextParallelRow
    ) -> list[NDArray[np.int64]]:
        """Return, for each context-parallel rank of a packed row, the indices of the encoder rows that it holds."""
        starts = np.cumsum([0, *lengths])
        tokens = [
            start + self.token_of_rows(sample, length)
            for sample, start, length in zip(samples, starts, lengths, strict=False)
        ]
        at = np.concatenate(tokens)
        return [np.flatnonzero(np.isin(at, of_rank)) for of_rank in share.of_rank]

    def look(
        self, rows: Tensor, samples: Sequence[EncodedSample], own_tokens: Sequence[NDArray[np.int64]]
    ) -> CrossAttentionRows:
        """Build the cross-attention inputs of a packed row of `samples` from their `rows`, [rows, hidden]. own_tokens:
        the tokens of each sample on this rank; a rank without any tokens runs one dummy token."""
        seen: list[tuple[Tensor, Tensor, Tensor] | None] = []
        of_samples = rows.split([self.count(sample) for sample in samples])
        for sample, own, here in zip(samples, of_samples, own_tokens, strict=True):
            if not len(own) or not len(here):
                seen.append(None)
                continue
            tiles = np.asarray(sample.media[self.unit][TILES])
            sees = torch.as_tensor(visible_tiles(sample.input_ids, self.placeholder_id, tiles)[here])
            sees = sees.flatten(1).repeat_interleave(self.rows_of_tile, 1).to(own.device)
            # The family's rule: a token before any image is not masked, and the block's feed-forward is zeroed for it.
            some = sees.any(1, keepdim=True)
            added = torch.zeros(sees.shape, dtype=own.dtype, device=own.device)
            added.masked_fill_(~sees & some, torch.finfo(own.dtype).min)
            seen.append((own[None], added[None, None], some.to(own.dtype)[None, None]))
        lengths = [len(here) for here in own_tokens]
        if not any(lengths):
            lengths, seen = [*lengths, 1], [*seen, None]
        is_seen = any(one is not None for one in seen)
        return CrossAttentionRows(tuple(lengths), tuple(seen), None if is_seen or not len(rows) else rows)

    def prepare(self, decoder: nn.Module, first: int) -> nn.Module:
        """Return a slice of the text model from block `first` on, with its cross-attention block numbers shifted."""
        model: Any = copy.copy(decoder)
        model.cross_attention_layers = [block - first for block in self.blocks]
        return model


def gather_rows(own: Tensor, of_rank: Sequence[NDArray[np.int64]], ranks: ContextRanks) -> Tensor:
    """All-gather the encoder rows of context-parallel ranks, [rows, hidden]; backward sums the gradients of all ranks.
    of_rank: the indices held by each rank (see `CrossAttentionLayout.divide`)."""
    return _GatherRows.apply(own, of_rank, ranks)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, of_rank: Sequence[NDArray[np.int64]], ranks: ContextRanks) -> Tensor:
        ctx.ranks, ctx.places = ranks, [torch.from_numpy(rows).to(own.device) for rows in of_rank]
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
    """Return the tiles that each token attends to, bool [tokens, images, tiles]: those of the last image before it and
    of images directly adjacent before that one. tiles: [images, tiles], 1 for existing tiles.

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
        module.__class__ = _by_sample(cast(Any, type(module)))
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
            made.append(
                run(
                    part,
                    attention_mask=None,
                    cross_attention_mask=added,
                    full_text_row_masked_out_mask=some,
                    **{STATES: rows},
                    **kwargs,
                )
            )
        hidden = torch.cat(made, 1)
        return hidden if given.unseen is None else hidden + 0 * given.unseen.sum()


_OF_ROWS = ("attention_mask", "cross_attention_mask", "full_text_row_masked_out_mask", PLAN_KEYWORD)


@cache
def _by_sample(own: Any) -> type[nn.Module]:
    if issubclass(own, _BySample):
        return own
    return type(own.__name__, (_BySample, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _is_row(lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    kinds = np.tile([False, True], len(lengths))
    return torch.from_numpy(np.repeat(kinds, np.stack([lengths, counts], 1).ravel()))


def cross_attention_layout(config: Any, unit: str, placeholder_id: int) -> CrossAttentionLayout:
    """Read the cross-attention layout from the config of a pretrained multimodal model."""
    vision = config.vision_config
    rows = (vision.image_size // vision.patch_size) ** 2 + 1
    return CrossAttentionLayout(unit, placeholder_id, tuple(config.text_config.cross_attention_layers), rows)
