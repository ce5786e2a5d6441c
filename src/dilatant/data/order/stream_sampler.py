"""Sampler for streamed sources: samples are shuffled in blocks, and resuming skips to the position."""

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
    """A source of samples in a fixed order that can be read again from any sample number."""

    @property
    def name(self) -> str: ...

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
