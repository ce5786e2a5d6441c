"""The order of samples when a source can only be read from its start: shuffled in blocks, resumed by skipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.order.sampler import SamplerState, choose_sources
from dilatant.data.permutation import permute
from dilatant.data.sample import Sample


class Stream(Protocol):
    """Samples in one order, again from any number on."""

    @property
    def name(self) -> str: ...

    def read(self, skip: int) -> Iterator[Sample | SampleError]: ...


@dataclass(frozen=True)
class StreamSampler:
    """As `Sampler`, for sources of unknown length.

    shuffle_block: samples that are held and shuffled together; 1 keeps the order. A block that has been left is
    never returned to, so a position in the middle of a stream is reached by skipping whole blocks.
    """

    streams: Sequence[Stream]
    weights: tuple[float, ...]
    seed: int
    global_batch_size: int
    shuffle_block: int = 512

    def start(self) -> SamplerState:
        return SamplerState((0,) * len(self.streams), (0,) * len(self.streams), self.seed)

    def resume(self, state: SamplerState) -> SamplerState:
        """`state` as a position in this order. Raises UserError when it belongs to other sources or another seed."""
        return state.checked(self.start())

    def epoch(self, state: SamplerState) -> float:
        """Unknown for a stream: 0."""
        return 0.0

    def batches(self, state: SamplerState) -> Iterator[tuple[list[Sample | SampleError], SamplerState]]:
        """Global batches from `state` on, without end: samples, and the state after them."""
        sources = [self._samples(number, drawn) for number, drawn in enumerate(state.drawn)]
        while True:
            chosen = choose_sources(self.weights, state.drawn, self.global_batch_size)
            state = state.after(chosen)
            yield [next(sources[source]) for source in chosen], state

    def _samples(self, source: int, ordinal: int) -> Iterator[Sample | SampleError]:
        """The samples of a source from `ordinal` on, pass after pass."""
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
                # The position is in a later pass: only reading tells how long one is.
                length = sum(len(samples) for samples in self._blocks(source, 0))
                if length == 0:
                    raise UserError(f"data set {self.streams[source].name!r} is empty")
            ordinal = max(0, ordinal - length)
            number += 1

    def _blocks(self, source: int, skip: int) -> Iterator[list[Sample | SampleError]]:
        samples = self.streams[source].read(skip)
        while block := list(islice(samples, self.shuffle_block)):
            yield block
