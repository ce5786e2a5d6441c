"""Loader: the global batches of a data set in the order of a sampler, made without plans and ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from dilatant.config import UserError
from dilatant.data.errors import SampleError
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import Dataset, EncodedSample, Sample
from dilatant.data.text.encoding import TOKENS, Encoding
from dilatant.data.workers.batches import GlobalBatch
from dilatant.data.workers.pool import InlineSource, SampleRequest, SampleSource
from dilatant.data.workers.pool_owner import PoolOwner
from dilatant.data.workers.pool_source import PoolSource

MEMORY_BYTES = 512 << 20
"""Memory of a loader for samples that are being made, or are ready and not taken."""


class Loader:
    """Iterate over global batches from `position` on, without end or for `steps` batches.

    The batches do not depend on the number of workers, and resuming from the position of any batch gives the same
    following batches.
    workers: processes that decode and tokenize; 0 works in the caller. prefetch: batches requested in advance.
    on_error: a corrupt sample raises UserError when its batch is due (`error`), or is omitted from its batch and
    reported (`skip`): the batch is then smaller, and the position advances as if the sample had been used.
    """

    def __init__(
        self,
        samples: Dataset,
        encoding: Encoding,
        sampler: SampleOrder,
        *,
        position: SamplerState = SamplerState(),  # noqa: B008 - a frozen value
        steps: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        on_error: Literal["error", "skip"] = "error",
    ) -> None:
        self._sampler = sampler
        self._skip = on_error == "skip"
        datasets = {"train": samples}
        self._owner = PoolOwner(datasets, encoding, workers) if workers else None
        self._source: SampleSource = (
            InlineSource(datasets, encoding) if self._owner is None else PoolSource(self._owner.address, MEMORY_BYTES)
        )
        parts = frozenset({TOKENS, *encoding.unit_names[1:]})
        ahead = prefetch if workers else 0
        begin = sampler.resume(position)
        self._batches = read_batches(self._source, "train", sampler, begin, parts, ahead, steps)

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        start = time.perf_counter()
        try:
            batch = self._batch(next(self._batches))
        except BaseException:  # includes StopIteration
            self.close()
            raise
        return replace(batch, wait_seconds=time.perf_counter() - start)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes. Idempotent."""
        with suppress(ValueError):  # another thread may be making a batch
            self._batches.close()
        self._source.close()
        if self._owner is not None:
            self._owner.close()

    def _batch(self, read: ReadBatch) -> GlobalBatch:
        encoded = [sample for sample in read.samples if not isinstance(sample, UserError)]
        wrong = [sample for sample in read.samples if isinstance(sample, UserError)]
        if wrong and not self._skip:
            raise wrong[0]
        if not encoded:
            raise UserError(f"every sample of a batch is corrupt; the first: {wrong[0]}")
        epoch = self._sampler.epoch(read.position)
        return GlobalBatch(tuple(encoded), read.position, epoch, tuple(map(str, wrong)))


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
