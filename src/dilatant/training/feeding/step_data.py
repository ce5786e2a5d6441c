"""Data of steps: the samples that each step draws, and what is known of them before their media are decoded."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count, islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dilatant.config import Config
from dilatant.data.errors import SampleError
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import EncodedSample, Sample
from dilatant.data.text.encoding import TOKENS
from dilatant.data.workers.pool import SampleRequest, SampleSource
from dilatant.planning.assemble import Samples

LOOK_AHEAD = 8
"""Steps whose samples are requested, as memory permits, before the step being assembled is complete: short steps
outlast a sample that takes long, or a worker that lost its processor. Below `cost_correction.INTERVAL`."""
STREAM_LOOK_AHEAD = 2
"""`LOOK_AHEAD` of a stream, whose undecoded samples each rank holds in addition."""
MEASURED_AHEAD = 1
"""Steps of a stream whose samples are being measured while a step is planned."""
STEPS_KEPT = STREAM_LOOK_AHEAD + 3
"""Steps of a stream between the one that is being read and the one that is executed."""
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class IndexedData:
    """Data set with known sizes. name: its key in the source of decoded samples. refused: sample → why it is
    unusable. references: float64 [samples, 2], see `EncodedSample.reference`; NaN where unknown."""

    name: str
    samples: Blend
    index: SizesIndex
    refused: Mapping[int, str]
    known: ClassVar[frozenset[str]] = frozenset()
    look_ahead: ClassVar[int] = LOOK_AHEAD
    references: NDArray[np.float64] | None = None

    def head(self, index: int, draw: int) -> EncodedSample:
        """Return what is known of a sample without reading it: name, sizes, targets and content digest."""
        row = self.index.tokens[index].tolist()
        reference: Any = None if self.references is None else tuple(self.references[index].tolist())
        return EncodedSample(
            self.samples.name(index),
            _NOTHING,
            _NOTHING,
            {},
            dict(zip(self.index.units, row, strict=True)),
            draw,
            int(self.index.target_tokens[index]),
            int(self.index.content[index]),
            self.samples.source_of(index),
            reference=reference,
            desired=None if self.index.desired is None else bool(self.index.desired[index]),
        )

    def undecoded(self, index: int) -> Sample | None:
        """Return None: data workers read samples by index themselves."""
        return None


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples of step number `step` in order. first: number of the first in the order of training. position: after
    them."""

    step: int
    indices: NDArray[np.int64]
    first: int
    position: SamplerState
    epoch: float = 0.0


def draws(sampler: Sampler, position: SamplerState, begin: int, end: int | None) -> Iterator[StepSamples]:
    """Yield the draws of steps `begin` to `end` (exclusive) of an order; endless if `end` is None."""
    for step in count(begin) if end is None else range(begin, end):
        first = position.samples
        indices, position = sampler.take(position, sampler.global_batch_size)
        yield StepSamples(step, indices, first, position, sampler.epoch(position))


class StreamedData:
    """Data set that is read in order, with the interface of `IndexedData`; data workers measure samples as they arrive.

    A sample's index is its number in the order of training. known: the parts that measuring gives.
    """

    known: ClassVar[frozenset[str]] = frozenset({TOKENS})
    look_ahead: ClassVar[int] = STREAM_LOOK_AHEAD

    def __init__(self, name: str, sampler: StreamSampler, source: SampleSource) -> None:
        self.name = name
        self.refused: dict[int, str] = {}
        self._sampler, self._source = sampler, source
        self._samples: dict[int, tuple[Sample, EncodedSample]] = {}

    def draws(self, position: SamplerState, begin: int, end: int | None) -> Iterator[StepSamples]:
        """Yield the draws of steps `begin` to `end` (exclusive), measured; endless if `end` is None."""
        steps = None if end is None else max(0, end - begin)
        waiting: deque[tuple[StepSamples, Sequence[Sample | SampleError]]] = deque()
        for step, (drawn, after) in enumerate(islice(self._sampler.batches(position), steps), begin):
            indices = np.arange(len(drawn)) + position.samples
            waiting.append((StepSamples(step, indices, position.samples, after), drawn))
            position = after
            unmeasured = [(index, each) for index, each in zip(indices.tolist(), drawn) if isinstance(each, Sample)]
            self._source.ask(
                [SampleRequest(index, index, self.known, self.name, sample=each) for index, each in unmeasured]
            )
            if len(waiting) > MEASURED_AHEAD:
                yield self._measured(*waiting.popleft())
        while waiting:
            yield self._measured(*waiting.popleft())

    def _measured(self, step: StepSamples, drawn: Sequence[Sample | SampleError]) -> StepSamples:
        """Wait for the sizes of a step's samples, and return the step."""
        for index, undecoded in zip(step.indices.tolist(), drawn):
            measured = self._source.take(self.name, index) if isinstance(undecoded, Sample) else undecoded
            if isinstance(measured, EncodedSample) and isinstance(undecoded, Sample):
                targets, content = measured.target_tokens, measured.content_digest
                head = replace(measured, draw=index, targets=targets, content=content, made_seconds=0.0)
                self._samples[index] = undecoded, head
            else:
                self.refused[index] = str(measured)
        self._forget_before(step.first - STEPS_KEPT * len(drawn))
        return step

    def head(self, index: int, draw: int) -> EncodedSample:
        """Return the sample without its media."""
        return self._samples[index][1]

    def undecoded(self, index: int) -> Sample:
        """Return the sample as it was read, for the worker that decodes its media."""
        return self._samples[index][0]

    def _forget_before(self, first: int) -> None:
        for known in (self._samples, self.refused):
            for index in [index for index in known if index < first]:
                del known[index]


def count_steps(config: Config, samples: Samples, done: int = 0, drawn: int = 0) -> int:
    """Return the optimizer steps of the run: `train.steps`, or enough for `train.epochs` passes (default 1).

    done, drawn: steps already done, and the samples they took, in batches of any size. Raises UserError for data of
    unknown length.
    """
    if config.train.steps is not None:
        return config.train.steps
    passes = 1.0 if config.train.epochs is None else config.train.epochs
    left = max(0.0, passes * len(samples.train) - drawn)
    return max(1, done + math.ceil(left / config.train.global_batch_size))


def seed_step(seed: int, step: int) -> None:
    """Seed the global generators with a key of this step, so that a resumed run draws what the undisturbed one would.

    Training models draw by sample (`models.dropout`); this is for what has no key, as Python's `random`.
    """
    key = int.from_bytes(sha256(f"{seed}/{step}".encode()).digest()[:4], "little")
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002  # model code draws from the global generator, if any
    # `torch.manual_seed` takes milliseconds for devices that are not used.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)
