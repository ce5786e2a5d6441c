"""Cross-attention in a packed row: the tokens and encoder rows of a rank, and the inputs of its cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dilatant.attention.context_parallel import ContextParallelRow
from dilatant.data.sample import EncodedSample
from dilatant.models.core.cross_attention import CrossAttentionLayout, CrossAttentionRows, gather_rows
from dilatant.models.language.packed_row import PackedRow

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class LocalCrossRows:
    """The tokens and encoder rows of a packed row that are on this rank. tokens, counts: for each sample, its tokens
    here and the number of its encoder rows here. of_rank: the encoder rows that each context-parallel rank holds. rows:
    the encoder rows here, [rows, hidden]; None if no rank has any."""

    crossing: CrossAttentionLayout
    samples: Sequence[EncodedSample]
    tokens: Sequence[Numbers]
    counts: Sequence[int]
    of_rank: Sequence[Numbers]
    share: ContextParallelRow | None
    rows: Tensor | None = None

    @classmethod
    def of(cls, crossing: CrossAttentionLayout, samples: Sequence[EncodedSample], row: PackedRow) -> Self:
        """Derive the tokens and encoder rows from a rank's packed `row` of samples."""
        counts, share = [crossing.count(sample) for sample in samples], row.share
        if share is None:
            return cls(crossing, samples, [np.arange(length) for length in row.lengths], counts, (), None)
        starts = np.cumsum([0, *row.lengths])
        tokens = [
            share.tokens[(share.tokens >= start) & (share.tokens < end)] - start
            for start, end in pairwise(starts)
        ]
        of_rank = crossing.divide(samples, row.lengths, share)
        sample_of = np.repeat(np.arange(len(samples)), counts)[of_rank[share.group.index]]
        here = np.bincount(sample_of, minlength=len(samples)).tolist()
        return cls(crossing, samples, tokens, here, of_rank, share)

    @property
    def unit(self) -> str:
        """The encoder's name."""
        return self.crossing.unit

    def passes(self, block: int) -> bool:
        """Return True if encoder rows cross the stage border before `block`."""
        return self.crossing.passes(block)

    def split(self, arrived: Tensor) -> Tensor:
        """Separate the received rows: store the encoder rows and return the tokens."""
        hidden, self.rows = self.crossing.split(arrived, [len(tokens) for tokens in self.tokens], self.counts)
        return hidden

    def join(self, hidden: Tensor) -> Tensor:
        """Put the encoder rows back among the hidden states of the tokens."""
        if self.rows is None:
            return hidden
        return self.crossing.join(hidden, self.rows, [len(tokens) for tokens in self.tokens], self.counts)

    def look(self, first: int, end: int, always: bool) -> CrossAttentionRows | None:
        """Build the cross-attention inputs of blocks `first <= block < end`. always: even without encoder rows."""
        rows = self.rows
        if not any(first <= block < end for block in self.crossing.blocks):
            return None
        if rows is not None and self.share is not None and any(map(len, self.of_rank)):
            rows = gather_rows(rows, self.of_rank, self.share.group)
        if rows is None or not len(rows):
            rows = torch.empty(0, 0)
            if not always:
                return None
        return self.crossing.look(rows, self.samples, self.tokens)
