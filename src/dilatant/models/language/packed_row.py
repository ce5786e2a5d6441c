"""Packed rows: the concatenated samples of a microbatch, and the tokens of it that one rank computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dilatant.attention.context_parallel import ContextParallelRow, ContextRanks
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.masks.placement import place_row
from dilatant.data.sample import EncodedSample
from dilatant.models.core.loss import IGNORED, shift_labels

Positions = Callable[[EncodedSample], NDArray[np.int64]]
"""Returns the positions of a sample's tokens: [tokens], or [kinds, tokens] for families with several kinds."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens that a rank runs, [tokens] on the host: a whole row, or this rank's context-parallel shard of it.

    position_ids: [tokens] or [kinds, tokens]. targets: the target of each token. sample_of: for each token of the rank
    but a dummy, the sample's index in the row. outputs: unit → the tokens whose rows it takes. lengths: tokens of each
    whole sample.
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
        cls, samples: Sequence[EncodedSample], unit: str, outputs: Mapping[str, int], positions: Positions | None = None
    ) -> PackedRow:
        """Pack whole samples. unit: the language model's name in `sizes`. outputs: unit → the id of its tokens.
        positions: for positions other than 0, 1, 2, ..."""
        lengths = tuple(sample.sizes[unit] for sample in samples)
        labels = torch.as_tensor(np.concatenate([sample.labels for sample in samples]))
        places = [place for sample in samples for place in _places(sample, positions)]
        position_ids = torch.as_tensor(np.concatenate(places, axis=-1))
        return cls(
            ids=torch.as_tensor(np.concatenate([sample.input_ids for sample in samples])),
            position_ids=position_ids,
            targets=shift_labels(labels[None], position_ids, None, lengths)[0],
            sample_of=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
            lengths=lengths,
            outputs={
                taker: torch.as_tensor(token_places(samples, taker, token_id)) for taker, token_id in outputs.items()
            },
        )

    def shared(
        self, plan: AttentionPlan, ranks: ContextRanks, placeholders: Sequence[int], placement: str
    ) -> PackedRow:
        """Return this rank's context-parallel shard. Targets were shifted before, because the next token may be on
        another rank. A rank without tokens runs a dummy token whose id is none of `placeholders`."""
        mask = plan.mask
        placed = place_row(mask, len(ranks.ranks), placement)
        in_windows = None if plan.in_windows is None else plan.in_windows.mask
        share = ContextParallelRow(mask, placed.placement, ranks, block=placed.block, mask_in_windows=in_windows)
        return PackedRow(
            ids=share.take(self.ids, next(number for number in count() if number not in placeholders)),
            position_ids=share.take(self.position_ids.movedim(-1, 0)).movedim(0, -1),
            targets=share.take(self.targets, IGNORED),
            sample_of=self.sample_of[torch.from_numpy(share.tokens)],
            lengths=self.lengths,
            outputs={unit: share.places(at) for unit, at in self.outputs.items()},
            share=share,
        )

    def answer_of(self, samples: Sequence[EncodedSample]) -> Tensor:
        """Return the answer of each of the rank's tokens, of two answers of each sample; those of the shared prompt
        count as the first's: int64 [tokens]."""
        second = [len(sample.input_ids) if sample.branch is None else sample.branch[1] for sample in samples]
        answers = [
            2 * number + (np.arange(length) >= begin)
            for number, (length, begin) in enumerate(zip(self.lengths, second, strict=True))
        ]
        whole = torch.from_numpy(np.concatenate(answers))
        return whole if self.share is None else self.share.take(whole)

    @property
    def index_in_sample(self) -> Tensor:
        """The index of each of the rank's tokens in its sample: int64 [tokens]."""
        whole = np.concatenate([np.arange(length) for length in self.lengths])
        return torch.from_numpy(whole if self.share is None else whole[self.share.tokens])[: len(self.sample_of)]

    def padded(self, hidden: Tensor) -> Tensor:
        """Pad hidden states [tokens, hidden] of the rank's tokens by the dummy token, if it runs one."""
        missing = len(self.ids) - len(hidden)
        return functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def unpadded(self, hidden: Tensor) -> Tensor:
        """Undo `padded`."""
        return hidden if len(hidden) == len(self.sample_of) else hidden[: len(self.sample_of)]

    def whole_row(self, values: Tensor, places: Tensor) -> Tensor:
        """Gather every rank's `values`, one per position in `places` (int64, this rank's), into row order."""
        if self.share is None:
            return values
        is_place = places.new_zeros(len(self.ids)).index_fill(0, places, 1)
        row = self.share.gather(values.new_zeros(len(self.ids)).index_copy(0, places, values))
        return row[self.share.gather(is_place) > 0]


def _places(sample: EncodedSample, positions: Positions | None) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of a sample's tokens; those of a rejected answer go on where its prompt ended."""
    for number, sequence in enumerate(sample.sequences()):
        places = np.arange(len(sequence.input_ids)) if positions is None else positions(sequence)
        yield places[..., sample.shared_tokens :] if number else places


def token_places(samples: Sequence[EncodedSample], unit: str, token_id: int) -> np.ndarray:
    """Return the positions in a packed row of the tokens for `unit`, for samples that have work there: int64."""
    has_work = [np.full(len(sample.input_ids), bool(sample.sizes.get(unit, 0))) for sample in samples]
    is_place = np.concatenate([sample.input_ids == token_id for sample in samples])
    return np.flatnonzero(is_place & np.concatenate(has_work))


def spatial_positions(
    ids: NDArray[np.int64],
    placeholders: Collection[int],
    grids: NDArray[np.int64],
    merge: int,
    steps: Sequence[float] | None = None,
    behind_time: bool = False,
) -> NDArray[np.int64]:
    """Return a sample's M-RoPE positions (Wang et al. 2024, "Qwen2-VL", 2.1), from sizes alone: int64 [4, tokens], the
    index in the sample, which separates the samples of a row, then time, height and width.

    grids: int64 [items, 3], patches (frames, rows, columns) of each item in text order; the text has one token of
    `placeholders` per group of `merge` by `merge` patches. steps: for each item, the time from one frame to the next
    (default: 1). Text advances all three by 1; the token after an item starts beyond its longer side or, with
    `behind_time`, beyond all of its positions. Raises ValueError if tokens and items do not agree.
    """
    is_media = np.isin(ids, list(placeholders))
    positions = np.empty((4, len(ids)), np.int64)
    positions[0] = np.arange(len(ids))
    at, start = 0, 0  # index in the row, next position
    for (frames, rows, columns), step in zip(grids.tolist(), steps or [1.0] * len(grids), strict=True):
        rows, columns = rows // merge, columns // merge
        begin = at + int(is_media[at:].argmax())
        end = begin + frames * rows * columns
        if not is_media[begin:end].all() or end > len(ids):
            raise ValueError("the tokens that stand for an item are not as many as its rows")
        text = begin - at
        positions[1:, at:begin] = start + np.arange(text)
        start += text
        place = np.indices((frames, rows, columns)).reshape(3, -1)
        if step != 1:  # in float32, as the families compute it
            place[0] = (place[0].astype(np.float32) * np.float32(step)).astype(np.int64)
        positions[1:, begin:end] = start + place
        start += int(place.max()) + 1 if behind_time else max(rows, columns)
        at = end
    if is_media[at:].any():
        raise ValueError("more tokens stand for items than there are items")
    positions[1:, at:] = start + np.arange(len(ids) - at)
    return positions
