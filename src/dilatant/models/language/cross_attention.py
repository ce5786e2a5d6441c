"""Cross-attention text models (Mllama) on packed rows, as an extension of their stages.

Encoder rows that later stages need are sent after the tokens of their sample; plans do not represent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilatant.attention.kernels.attention_plan import to_device
from dilatant.data.media_units.tiled_image_unit import TILES
from dilatant.data.sample import EncodedSample
from dilatant.models.core.cross_attention import STATES, CrossAttentionRows, gather_rows, visible_tiles
from dilatant.models.language.extension import Extension, LanguageForward

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CrossAttention(Extension):
    """Cross-attention of a text model. unit: the encoder. blocks: the cross-attention blocks, numbered in the whole
    model. rows_of_tile: encoder rows of each image tile."""

    unit: str
    placeholder_id: int
    blocks: tuple[int, ...]
    rows_of_tile: int

    @classmethod
    def of(cls, config: Any, unit: str, placeholder_id: int) -> CrossAttention:
        """Read the layout from the config of a pretrained multimodal model."""
        vision = config.vision_config
        rows = (vision.image_size // vision.patch_size) ** 2 + 1
        return cls(unit, placeholder_id, tuple(config.text_config.cross_attention_layers), rows)

    def passes(self, block: int) -> bool:
        """Return True if a stage that begins at `block`, or a later one, needs encoder rows."""
        return any(own >= block for own in self.blocks)

    def count(self, sample: EncodedSample) -> int:
        """Return the number of encoder rows of a sample."""
        return sample.sizes.get(self.unit, 0)

    def token_of_rows(self, sample: EncodedSample, tokens: int) -> Numbers:
        """Assign each encoder row of a sample to a token, evenly; the token's context-parallel rank holds the row."""
        rows = self.count(sample)
        return np.arange(rows) * tokens // max(1, rows)

    def begin(self, forward: LanguageForward) -> None:
        row, span, share = forward.packed, forward.span, forward.packed.share
        counts = [self.count(sample) for sample in forward.samples]
        tokens: list[Numbers] = [np.arange(length) for length in row.lengths]
        of_rank: list[Numbers] = []
        if share is not None:
            starts = np.cumsum([0, *row.lengths])
            places = np.concatenate(
                [
                    start + self.token_of_rows(sample, length)
                    for sample, start, length in zip(forward.samples, starts, row.lengths, strict=False)
                ]
            )
            of_rank = [np.flatnonzero(np.isin(places, of_one)) for of_one in share.of_rank]
            sample_of = np.repeat(np.arange(len(counts)), counts)[of_rank[share.group.index]]
            counts = np.bincount(sample_of, minlength=len(counts)).tolist()
            tokens = [
                share.tokens[(share.tokens >= start) & (share.tokens < end)] - start for start, end in pairwise(starts)
            ]
        is_row = _is_row([len(of_sample) for of_sample in tokens], counts)
        rows: Tensor | None = None
        if span.is_first:
            rows = forward.rows.pop(self.unit, None)
        elif self.passes(span.first):
            assert forward.hidden is not None
            arrived = forward.hidden
            at = (to_device(each.nonzero().squeeze(-1), arrived.device) for each in (~is_row, is_row))
            forward.hidden, rows = (arrived[each] for each in at)
        forward.state[self] = rows, is_row
        if not any(span.first <= block < span.end for block in self.blocks):
            return
        if rows is not None and share is not None and any(map(len, of_rank)):
            rows = gather_rows(rows, of_rank, share.group)
        if rows is None or not len(rows):
            rows = torch.empty(0, 0)
            if forward.shards is None:  # tensor-parallel ranks communicate in every block, also without encoder rows
                return
        forward.keywords[STATES] = self._seen(rows, forward.samples, tokens)

    def send(self, forward: LanguageForward, rows: Tensor) -> Tensor:
        encoder_rows, is_row = forward.state[self]
        if encoder_rows is None or not self.passes(forward.span.end):
            return rows
        order = torch.argsort(is_row, stable=True).argsort()
        return torch.cat([rows, encoder_rows])[to_device(order, rows.device)]

    def _seen(
        self, rows: Tensor, samples: Sequence[EncodedSample], local_tokens: Sequence[Numbers]
    ) -> CrossAttentionRows:
        """Build the cross-attention inputs of a packed row of `samples` from their `rows`, [rows, hidden].
        local_tokens: the tokens of each sample on this rank; a rank without any tokens runs one dummy token."""
        seen: list[tuple[Tensor, Tensor, Tensor] | None] = []
        of_samples = rows.split([self.count(sample) for sample in samples])
        for sample, own, here in zip(samples, of_samples, local_tokens, strict=True):
            if not len(own) or not len(here):
                seen.append(None)
                continue
            tiles = np.asarray(sample.media[self.unit][TILES])[:, 0]
            sees = torch.as_tensor(visible_tiles(sample.input_ids, self.placeholder_id, tiles)[here])
            sees = to_device(sees.flatten(1).repeat_interleave(self.rows_of_tile, 1), own.device)
            # The family's rule: a token before any image is not masked, and the block's feed-forward is zeroed for it.
            some = sees.any(1, keepdim=True)
            added = torch.zeros(sees.shape, dtype=own.dtype, device=own.device)
            added.masked_fill_(~sees & some, torch.finfo(own.dtype).min)
            seen.append((own[None], added[None, None], some.to(own.dtype)[None, None]))
        lengths = [len(here) for here in local_tokens]
        if not any(lengths):
            lengths, seen = [*lengths, 1], [*seen, None]
        is_seen = any(one is not None for one in seen)
        return CrossAttentionRows(tuple(lengths), tuple(seen), None if is_seen or not len(rows) else rows)


def _is_row(lengths: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return True for each encoder row of [tokens + rows], where each sample's rows follow its tokens."""
    kinds = np.tile([False, True], len(lengths))
    return torch.from_numpy(np.repeat(kinds, np.stack([lengths, counts], 1).ravel()))
