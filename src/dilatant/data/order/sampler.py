"""Sampler: a seeded, resumable order of samples over weighted sources, whose position is a small value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.permutation import permute
from dilatant.data.readers.records import Blocks
from dilatant.data.sample import Sample


@dataclass(frozen=True, slots=True)
class SamplerState:
    """A position in the data: the number of samples taken from each source, independent of devices and batch size.

    lengths and seed identify the order to which the position belongs. The default is the start of any order.
    """

    drawn: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    seed: int = 0

    @property
    def samples(self) -> int:
        """Total number of samples taken from all sources."""
        return sum(self.drawn)

    def after(self, sources: NDArray[np.int64]) -> SamplerState:
        """Return the state after one more sample from each of `sources`."""
        more = np.bincount(sources, minlength=len(self.drawn))
        return replace(self, drawn=tuple(int(count) for count in np.array(self.drawn) + more))

    def checked(self, start: SamplerState) -> SamplerState:
        """Return this state if its lengths and seed equal those of `start`. Raises UserError otherwise."""
        if not self.drawn:
            return start
        problems = []
        if self.lengths != start.lengths:
            before, now = (", ".join(f"{length:,}" for length in each) for each in (self.lengths, start.lengths))
            problems.append(f"its sources had {before} samples, and now have {now}")
        if self.seed != start.seed:
            problems.append(f"'seed' was {self.seed}, and now is {start.seed}")
        if problems:
            raise UserError(
                f"the place in the data is that of another order of samples: {'; '.join(problems)}. Restore the data "
                "and the seed, or start a new run from the weights"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "lengths": list(self.lengths), "seed": self.seed}

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> SamplerState:
        return msgspec.convert(tree, SamplerState)


@dataclass(frozen=True)
class Sampler:
    """The training order of samples from several sources, in global batches.

    lengths: samples of each source. weights: the fraction of samples from each source. Indices are positions in the
    concatenated sources. Every source is reshuffled in each of its passes, and a pass contains every sample once; a
    batch may span two passes. With `shuffle` off, each source keeps its order.
    blocks: set for sources that are read in blocks. Such a source is shuffled in two steps, first the blocks and
    then the samples within a window of as many blocks as the reader caches, so that a pass reads each block once.
    """

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    global_batch_size: int
    shuffle: bool = True
    blocks: tuple[Blocks | None, ...] = ()
    _block_orders: dict[tuple[int, int], _BlockOrder] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) <= 0 or len(self.lengths) != len(self.weights):
            raise ValueError(f"a sampler needs sources with samples and a weight each, not {self}")
        if min(self.weights) <= 0 or self.global_batch_size <= 0:
            raise ValueError(f"weights and the global batch size must be positive: {self}")

    @property
    def num_samples(self) -> int:
        """Total number of samples of all sources, which is one epoch."""
        return sum(self.lengths)

    def start(self) -> SamplerState:
        return SamplerState((0,) * len(self.lengths), self.lengths, self.seed)

    def resume(self, state: SamplerState) -> SamplerState:
        """Return `state` as a position in this order. Raises UserError if the data or the seed changed: resuming would
        repeat some samples and omit others."""
        return state.checked(self.start())

    def epoch(self, state: SamplerState) -> float:
        """Return the number of passes over the data: samples taken divided by the number of samples."""
        return state.samples / self.num_samples

    def batches(self, state: SamplerState) -> Iterator[tuple[list[int], SamplerState]]:
        """Yield global batches from `state` on, without end: (indices, the state after the batch)."""
        while True:
            indices, state = self.take(state, self.global_batch_size)
            yield indices.tolist(), state

    def take(self, state: SamplerState, count: int) -> tuple[NDArray[np.int64], SamplerState]:
        """Return the indices of the next `count` samples, int64 [count], and the state after them."""
        sources = choose_sources(self.weights, state.drawn, count)
        indices = np.empty(count, np.int64)
        offset = 0
        for source, length in enumerate(self.lengths):
            chosen = sources == source
            ordinals = state.drawn[source] + np.arange(int(chosen.sum()))
            indices[chosen] = offset + self._order(source, ordinals)
            offset += length
        return indices, state.after(sources)

    def _order(self, source: int, ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map a source's running sample numbers to sample numbers inside the source: int64, the shape of `ordinals`."""
        length = self.lengths[source]
        passes, positions = np.divmod(ordinals, length)
        if not self.shuffle:
            return positions
        blocks = self.blocks[source] if self.blocks else None
        result = np.empty_like(positions)
        for number in np.unique(passes):
            chosen = passes == number
            stream = (source, int(number))
            result[chosen] = (
                permute(positions[chosen], length, self.seed, stream)
                if blocks is None
                else self._block_order(blocks, stream).permute(positions[chosen])
            )
        return result

    def _block_order(self, blocks: Blocks, stream: tuple[int, int]) -> _BlockOrder:
        """Return the block order of one pass (`stream` = source, pass), cached because many batches share it."""
        if stream not in self._block_orders:
            if len(self._block_orders) > 2 * len(self.lengths):
                self._block_orders.clear()
            self._block_orders[stream] = _BlockOrder.of(blocks, self.seed, stream)
        return self._block_orders[stream]


def choose_sources(weights: Sequence[float], drawn: Sequence[int], count: int) -> NDArray[np.int64]:
    """Choose the source of each of the next `count` samples, int64 [count]: the source furthest behind its weight."""
    if len(weights) == 1:
        return np.zeros(count, np.int64)
    share = np.array(weights) / sum(weights)
    taken = np.array(drawn, np.int64)
    sources = np.empty(count, np.int64)
    for at in range(count):
        sources[at] = np.argmax(share * (int(taken.sum()) + 1) - taken)
        taken[sources[at]] += 1
    return sources


@dataclass(frozen=True, slots=True)
class _BlockOrder:
    """The shuffled order of one pass over a source that is read in blocks. Arrays are int64, one entry for each block
    in the shuffled order or, for `window_ends`, for each window of blocks that is shuffled together."""

    seed: int
    stream: tuple[int, ...]
    first: NDArray[np.int64]
    """Start of each block in the source."""
    ends: NDArray[np.int64]
    """End of each block in the shuffled order."""
    lengths: NDArray[np.int64]
    window_ends: NDArray[np.int64]

    @staticmethod
    def of(blocks: Blocks, seed: int, stream: tuple[int, ...]) -> _BlockOrder:
        lengths = np.array(blocks.lengths, np.int64)
        first = np.cumsum(lengths) - lengths
        # Blocks of one group stay together and in order, because a group can only be read sequentially.
        group = np.array(blocks.groups, np.int64) if blocks.groups else np.arange(len(lengths))
        count = int(group[-1]) + 1
        place = permute(np.arange(count), count, seed, (*stream, 0))
        order = np.argsort(np.argsort(place)[group], kind="stable")
        ends = np.cumsum(lengths[order])
        window_ends = ends[blocks.window - 1 :: blocks.window]
        if not len(window_ends) or window_ends[-1] < ends[-1]:
            window_ends = np.append(window_ends, ends[-1])
        return _BlockOrder(seed, stream, first[order], ends, lengths[order], window_ends)

    def permute(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions to samples as `data.permutation.permute` does, but with neighbours from few blocks."""
        window = np.searchsorted(self.window_ends, positions, side="right")
        result = np.empty_like(positions)
        for number in np.unique(window):
            chosen = window == number
            start = int(self.window_ends[number - 1]) if number else 0
            size = int(self.window_ends[number]) - start
            inside = start + permute(positions[chosen] - start, size, self.seed, (*self.stream, 1, int(number)))
            place = np.searchsorted(self.ends, inside, side="right")
            result[chosen] = self.first[place] + inside - (self.ends[place] - self.lengths[place])
        return result


class Stream(Protocol):
    """A source of samples in a fixed order that can be read again from any sample number. identity: a digest of what is
    read, "" if it is not known without reading."""

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...
    def read(self, skip: int) -> Iterator[Sample | SampleError]: ...


@dataclass(frozen=True)
class StreamSampler:
    """The training order of streamed sources, whose lengths are unknown; has the interface of `Sampler`.

    shuffle_block: number of samples that are buffered and shuffled together; 1 keeps the order. The sampler never
    returns to a finished block, so it reaches a position inside a stream by skipping whole blocks.
    """

    streams: Sequence[Stream]
    weights: tuple[float, ...]
    seed: int
    global_batch_size: int
    shuffle_block: int = 512

    def start(self) -> SamplerState:
        return SamplerState((0,) * len(self.streams), (0,) * len(self.streams), self.seed)

    def resume(self, state: SamplerState) -> SamplerState:
        """Return `state` as a position in this order. Raises UserError if the sources or the seed changed."""
        return state.checked(self.start())

    def epoch(self, state: SamplerState) -> float:
        """Return 0, because the length of a stream is unknown."""
        return 0.0

    def batches(self, state: SamplerState) -> Iterator[tuple[list[Sample | SampleError], SamplerState]]:
        """Yield global batches from `state` on, without end: (samples, the state after the batch)."""
        sources = [self._samples(number, drawn) for number, drawn in enumerate(state.drawn)]
        while True:
            chosen = choose_sources(self.weights, state.drawn, self.global_batch_size)
            state = state.after(chosen)
            yield [next(sources[source]) for source in chosen], state

    def _samples(self, source: int, ordinal: int) -> Iterator[Sample | SampleError]:
        """Yield the samples of a source from number `ordinal` on, pass after pass."""
        number = 0
        while True:
            length = 0
            skip = ordinal // self.shuffle_block * self.shuffle_block
            for block, samples in enumerate(self._blocks(source, skip), skip // self.shuffle_block):
                order = permute(np.arange(len(samples)), len(samples), self.seed, (source, number, block))
                yield from (samples[at] for at in order[max(0, ordinal - skip - length) :])
                length += len(samples)
            length += skip
            if length <= skip:
                # The position is in a later pass; the length of a pass is only known after reading it.
                length = sum(len(samples) for samples in self._blocks(source, 0))
                if length == 0:
                    raise UserError(f"data set {self.streams[source].name!r} is empty")
            ordinal = max(0, ordinal - length)
            number += 1

    def _blocks(self, source: int, skip: int) -> Iterator[list[Sample | SampleError]]:
        samples = self.streams[source].read(skip)
        while block := list(islice(samples, self.shuffle_block)):
            yield block
