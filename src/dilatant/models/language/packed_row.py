"""Packed rows: the samples of a microbatch one behind the other, and what one rank computes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dilatant.attention.context_parallel import ContextParallelRow, Ranks
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.masks.placement import place_row
from dilatant.data.sample import EncodedSample
from dilatant.models.core.loss import IGNORED, shift_labels

Positions = Callable[[EncodedSample], NDArray[np.int64]]
"""Where the tokens of a sample are: [tokens], or [kinds, tokens] of a family with several kinds of positions."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Tokens that a rank runs, [tokens] on the host: those of a row, or its share of them.

    position_ids: [tokens] or [kinds, tokens]. targets: what each token is to predict. sample_of: of each token that
    the rank has, the sample's place in the row. outputs: unit → the tokens whose rows it takes. lengths: of the
    samples, whole.
    """

    ids: Tensor
    position_ids: Tensor
    targets: Tensor
    sample_of: Tensor
    outputs: Mapping[str, Tensor]
    lengths: tuple[int, ...]
    share: ContextParallelRow | None = None

    @classmethod
    def of(
        cls,
        samples: Sequence[EncodedSample],
        unit: str,
        outputs: Mapping[str, int],
        positions: Positions | None = None,
    ) -> PackedRow:
        """All of the samples, which have so many tokens of `unit`. outputs: unit → the id of its tokens. positions: if
        tokens do not simply follow each other."""
        lengths = tuple(sample.sizes[unit] for sample in samples)
        labels = torch.as_tensor(np.concatenate([sample.labels for sample in samples]))
        places = [
            np.arange(length) if positions is None else positions(sample)
            for sample, length in zip(samples, lengths, strict=True)
        ]
        position_ids = torch.as_tensor(np.concatenate(places, axis=-1))
        return cls(
            ids=torch.as_tensor(np.concatenate([sample.input_ids for sample in samples])),
            position_ids=position_ids,
            targets=shift_labels(labels[None], position_ids, None, lengths)[0],
            sample_of=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            lengths=lengths,
            outputs={
                taker: torch.as_tensor(token_places(samples, taker, token_id))
                for taker, token_id in outputs.items()
            },
        )

    def shared(
        self, plan: AttentionPlan, ranks: Ranks, placeholders: Sequence[int], placement: str
    ) -> PackedRow:
        """This rank's share. Targets have been shifted before: the next token may be another rank's. A rank without
        tokens runs one that nobody sees, and that stands for none of `placeholders`."""
        mask = plan.mask
        placed = place_row(mask, len(ranks.ranks), placement)
        in_windows = None if plan.in_windows is None else plan.in_windows.mask
        share = ContextParallelRow(
            mask, placed.placement, ranks, block=placed.block, mask_in_windows=in_windows
        )
        return PackedRow(
            ids=share.take(self.ids, next(number for number in count() if number not in placeholders)),
            position_ids=share.take(self.position_ids.T).T,
            targets=share.take(self.targets, IGNORED),
            sample_of=self.sample_of[torch.from_numpy(share.tokens)],
            lengths=self.lengths,
            outputs={unit: share.places(at) for unit, at in self.outputs.items()},
            share=share,
        )

    def padded(self, hidden: Tensor) -> Tensor:
        """Hidden states of the tokens that are run, of those that the rank has: [tokens, hidden]."""
        missing = len(self.ids) - len(hidden)
        return functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def unpadded(self, hidden: Tensor) -> Tensor:
        """The reverse of `padded`."""
        return hidden if self.share is None else hidden[: self.share.tokens.size]

    def whole_row(self, values: Tensor, places: Tensor) -> Tensor:
        """Values at some places of all ranks' tokens, in the order of the row. places: this rank's, int64."""
        if self.share is None:
            return values
        is_place = places.new_zeros(len(self.ids)).index_fill(0, places, 1)
        row = self.share.gather(values.new_zeros(len(self.ids)).index_copy(0, places, values))
        return row[self.share.gather(is_place) > 0]


def token_places(samples: Sequence[EncodedSample], unit: str, token_id: int) -> np.ndarray:
    """Where in a packed row the rows of `unit` are, of the samples that have work there: int64."""
    has_work = [np.full(len(sample.input_ids), bool(sample.sizes.get(unit, 0))) for sample in samples]
    is_place = np.concatenate([sample.input_ids == token_id for sample in samples])
    return np.flatnonzero(is_place & np.concatenate(has_work))
