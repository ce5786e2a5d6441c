"""What a rank has of a packed row whose tokens look at rows of an encoder (see `crossing`), and sees of it."""

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
from dilatant.models.core.cross_attention import Crossing, CrossRows, gather_rows
from dilatant.models.language.packed_row import PackedRow

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class RowsHere:
    """tokens, counts: of each sample, those of its tokens that are here, and how many of its rows. of_rank: which of
    all rows each of the ranks has that share tokens. rows: those that are here, [rows, hidden], if there are any
    anywhere."""

    crossing: Crossing
    samples: Sequence[EncodedSample]
    tokens: Sequence[Numbers]
    counts: Sequence[int]
    of_rank: Sequence[Numbers]
    share: ContextParallelRow | None
    rows: Tensor | None = None

    @classmethod
    def of(cls, crossing: Crossing, samples: Sequence[EncodedSample], row: PackedRow) -> Self:
        """Of a rank's `row` of samples."""
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
        """The encoder."""
        return self.crossing.unit

    def passes(self, block: int) -> bool:
        """Whether rows pass the border before a block."""
        return self.crossing.passes(block)

    def split(self, arrived: Tensor) -> Tensor:
        """The tokens of what arrived with rows, which are kept."""
        hidden, self.rows = self.crossing.split(arrived, [len(tokens) for tokens in self.tokens], self.counts)
        return hidden

    def join(self, hidden: Tensor) -> Tensor:
        """Hidden states of tokens, with the rows that go on with them."""
        if self.rows is None:
            return hidden
        return self.crossing.join(hidden, self.rows, [len(tokens) for tokens in self.tokens], self.counts)

    def look(self, first: int, end: int, always: bool) -> CrossRows | None:
        """What blocks `first <= block < end` see. always: also where there is nothing to see."""
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
