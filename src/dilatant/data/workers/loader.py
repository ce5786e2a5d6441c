"""Loader: iterate over global batches of encoded samples, with worker processes and prefetch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.order.sampler import SamplerState
from dilatant.data.sample import EncodedSample, Sample
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import TASK_SECONDS, WorkerPool
from dilatant.data.workers.pool import Dataset
from dilatant.data.workers.prefetch import Prefetcher


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


LoaderTask = int | Sample | SampleError
"""A sample to encode: its index, the sample itself, or the error from reading it."""


class SampleOrder(Protocol):
    """The order of samples: a `Sampler` or a `StreamSampler`."""

    @property
    def global_batch_size(self) -> int: ...

    def resume(self, state: SamplerState) -> SamplerState: ...

    def batches(self, state: SamplerState) -> Iterator[tuple[Sequence[LoaderTask], SamplerState]]: ...

    def epoch(self, state: SamplerState) -> float: ...


@dataclass(frozen=True)
class _EncodeJob:
    samples: Dataset
    encoding: Encoding
    parts: frozenset[str] | None

    def __call__(self, task: LoaderTask) -> EncodedSample:
        if isinstance(task, SampleError):
            raise task
        sample = self.samples[task] if isinstance(task, int) else task
        return encode_sample(sample, self.encoding, self.parts)


def _named(task: LoaderTask) -> str:
    if isinstance(task, int):
        return f"sample {task} (counted from 0 through all sources)"
    return task.id if isinstance(task, Sample) else task.sample


class Loader:
    """Iterate over global batches from `position` on, without end or for `steps` batches.

    The batches do not depend on the number of workers, and resuming from the position of any batch gives the same
    following batches.
    workers: processes that decode and tokenize; 0 works in the caller, without prefetch. prefetch: batches kept ready
    in addition to the one being assembled.
    on_error: a corrupt sample raises UserError when its batch is due (`error`), or is omitted from its batch and
    reported (`skip`): the batch is then smaller, and the position advances as if the sample had been used.
    sample_seconds: time limit of a worker for one sample; WorkerError then names the worker and the sample.
    parts: the parts of every sample to load (see `encode_sample`); None for all.
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
        sample_seconds: float = TASK_SECONDS,
        parts: frozenset[str] | None = None,
    ) -> None:
        self._sampler = sampler
        self._start = sampler.resume(position)
        self._steps = steps
        self._skip = on_error == "skip"
        # One more batch is ready in the prefetch queue, and one waits to enter it.
        self._ahead = max(1, prefetch - 1) * sampler.global_batch_size
        self._positions: deque[SamplerState] = deque()
        self._pool: WorkerPool[LoaderTask, EncodedSample] = WorkerPool(
            _EncodeJob(samples, encoding, parts), workers, named=_named, task_seconds=sample_seconds
        )
        batches = self._make_batches()
        self._batches = Prefetcher(batches, "dilatant-loader") if workers else batches

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self

    def __next__(self) -> GlobalBatch:
        start = time.perf_counter()
        try:
            batch = next(self._batches)
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
        self._pool.close()
        with suppress(ValueError):  # without workers, another thread may be making a batch
            self._batches.close()

    def _make_batches(self) -> Generator[GlobalBatch]:
        results = self._pool.map(self._tasks(), self._ahead)
        while batch := list(islice(results, self._sampler.global_batch_size)):
            yield self._batch(batch, self._positions.popleft())

    def _tasks(self) -> Iterator[LoaderTask]:
        for tasks, position in islice(self._sampler.batches(self._start), self._steps):
            self._positions.append(position)
            yield from tasks

    def _batch(self, results: Sequence[EncodedSample | UserError], position: SamplerState) -> GlobalBatch:
        encoded = [result for result in results if not isinstance(result, UserError)]
        wrong = [result for result in results if isinstance(result, UserError)]
        if wrong and not self._skip:
            raise wrong[0]
        if not encoded:
            raise UserError(f"every sample of a batch is corrupt; the first: {wrong[0]}")
        return GlobalBatch(tuple(encoded), position, self._sampler.epoch(position), tuple(map(str, wrong)))
