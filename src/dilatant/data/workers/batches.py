"""Global batches: the samples of a step, and the batches of a stream, requested from a source in advance."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import EncodedSample, Sample
from dilatant.data.workers.pool import SampleRequest, SampleSource


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one step.

    samples: in the sampler's order. position: the sampler's state after this batch, which a checkpoint written after
    this step must hold. epoch: passes over the data at that position. problems: the errors of the skipped samples.
    wait_seconds: seconds that the trainer waited for this batch. slowest: the samples that took longest to read and
    decode, slowest first, with their seconds; only samples that this process uses.
    """

    samples: tuple[EncodedSample, ...]
    position: SamplerState
    epoch: float
    problems: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    slowest: tuple[tuple[str, float], ...] = ()

    @property
    def skipped(self) -> int:
        """Return the number of corrupt samples that were skipped."""
        return len(self.problems)

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def target_tokens(self) -> int:
        """Return the number of tokens that carry loss in the whole batch: the divisor of the loss."""
        return sum(sample.target_tokens for sample in self.samples)

    @property
    def tokens(self) -> dict[str, int]:
        """Return the tokens that each unit processes in this step, by unit."""
        total: dict[str, int] = {}
        for sample in self.samples:
            for unit, tokens in sample.sizes.items():
                total[unit] = total.get(unit, 0) + tokens
        return total


Drawn = int | Sample | SampleError
"""A sample as its sampler draws it: its index, a stream's sample itself, or the error from reading it."""


SampleOrder = Sampler | StreamSampler


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A batch as drawn and as encoded, sample by sample. first: number of its first sample in the order of training.
    position: after the batch."""

    drawn: Sequence[Drawn]
    samples: Sequence[EncodedSample | UserError]
    first: int
    position: SamplerState


def read_batches(
    source: SampleSource,
    dataset: str,
    sampler: SampleOrder,
    position: SamplerState,
    parts: frozenset[str],
    ahead: int,
    steps: int | None,
) -> Generator[ReadBatch]:
    """Yield the batches of an order from `position` on, `steps` of them or without end. parts: of each sample,
    requested from `source`. ahead: batches that are requested before the one that is yielded is complete."""
    waiting: deque[tuple[int, Sequence[Drawn], SamplerState]] = deque()
    first = position.samples

    def complete() -> ReadBatch:
        begin, due, after = waiting.popleft()
        samples = [
            each if isinstance(each, SampleError) else source.take(dataset, number)
            for number, each in enumerate(due, begin)
        ]
        return ReadBatch(due, samples, begin, after)

    order: Iterator[tuple[Sequence[Drawn], SamplerState]] = sampler.batches(position)
    for drawn, after in islice(order, steps):
        requests = [
            SampleRequest(number, each, parts, dataset)
            if isinstance(each, int)
            else SampleRequest(number, number, parts, dataset, sample=each)
            for number, each in enumerate(drawn, first)
            if not isinstance(each, SampleError)
        ]
        source.ask(requests)
        waiting.append((first, drawn, after))
        first += len(drawn)
        if len(waiting) > ahead:
            yield complete()
    while waiting:
        yield complete()
