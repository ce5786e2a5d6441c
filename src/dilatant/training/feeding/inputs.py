"""Inputs of a rank: batches for training and evaluation, planned by size if the data are indexed, else from a stream
that one rank of a machine reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from dilatant.comm.comm import Comm
from dilatant.config import Config
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler, SamplerState
from dilatant.data.order.stream_sampler import StreamSampler
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import QUESTION, TOKENS
from dilatant.data.workers.loader import GlobalBatch, Loader, SampleOrder
from dilatant.data.workers.ordered_map import workers_of_machine
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.feeding.decode_requirements import DecodeRequirements
from dilatant.training.feeding.decoding import PersistentPool, decoding_of, open_source
from dilatant.training.feeding.feed import (
    IndexedData,
    StepInput,
    StepPrefetcher,
    StepSamples,
    draws,
    gather_bad_samples,
)
from dilatant.training.feeding.shared_batches import SharedBatches

TRAIN, HELD_OUT = "train", "eval"
"""Keys of the data sets in the source of decoded samples."""


class Steps(Protocol):
    """Iterator over the steps of a run. Before each step ranks exchange the bad samples that they `found` in it, and
    leave out what any of them found (see `StepPrefetcher`). waited_seconds: for samples, so far."""

    left_out: Mapping[int, str]
    waited_seconds: float

    def __next__(self) -> StepInput[PreparedStep]: ...

    def found(self) -> list[tuple[int, str]]: ...

    def leave_out(self, found: Iterable[tuple[int, str]]) -> None: ...


class RankInputs:
    """Batches of one rank; made by all ranks together. What it starts runs until `close()`, except a given `pool`."""

    def __init__(
        self,
        comm: Comm,
        runtime: Runtime,
        config: Config,
        samples: Samples,
        pool: PersistentPool | None = None,
    ) -> None:
        self._comm = comm
        self._runtime = runtime
        self._config = config
        self._samples = samples
        self._skips = config.data.on_error == "skip"
        self._needs = DecodeRequirements(runtime.model, runtime.plan, comm.rank)
        self._data = {
            name: IndexedData(name, blend, sizes, sizes.refused(samples.encoding.max_length))
            for name, blend, sizes in (
                (TRAIN, samples.train, samples.train_sizes),
                (HELD_OUT, samples.held_out, samples.held_out_sizes),
            )
            if isinstance(blend, Blend) and sizes is not None
        }
        self._shared = None if TRAIN in self._data else SharedBatches(comm, bool(self._needs.media))
        data = config.data
        datasets = {name: known.samples for name, known in self._data.items()}
        self._source = open_source(comm, datasets, samples.encoding, decoding_of(data), pool)

    @property
    def is_stream(self) -> bool:
        """True if samples are known only once they are read."""
        return self._shared is not None

    @contextmanager
    def training(
        self,
        sampler: Sampler | StreamSampler,
        position: SamplerState,
        begin: int,
        end: int,
        left_out: Mapping[int, str],
    ) -> Iterator[Steps]:
        """Open steps number `begin` to `end` of an order. left_out: samples that proved bad before."""
        if self._shared is not None:
            with self._shared.open(lambda: self._open_loader(sampler, position, end - begin)) as batches:
                yield _StreamedSteps(batches, self._runtime, begin)
            return
        assert isinstance(sampler, Sampler)
        with StepPrefetcher(
            self._data[TRAIN],
            draws(sampler, position, begin, end),
            self._source,
            self._plan_step,
            self._needed,
            skips=self._skips,
            left_out=left_out,
        ) as feed:
            yield feed

    def held_out(self, limit: int | None, batch_size: int) -> Iterator[StepInput[PreparedStep]]:
        """Yield batches of held-out samples as questions (see `encode_sample`), without refused ones. limit: per data
        set."""
        data = self._data[HELD_OUT]
        indices = np.array([index for index in self._first(limit) if index not in data.refused], np.int64)
        batches = (
            StepSamples(0, indices[start : start + batch_size], start, SamplerState())
            for start in range(0, len(indices), batch_size)
        )
        with StepPrefetcher(
            data, batches, self._source, self._plan_forwards, self._asked, skips=self._skips
        ) as feed:
            while True:
                if self._skips:
                    feed.leave_out(gather_bad_samples(self._comm, feed.found()))
                step = next(feed, None)
                if step is None:
                    return
                yield step

    def refused(self, limit: int | None) -> tuple[str, ...]:
        """Return why held-out samples are left out, as far as sizes tell."""
        refused = self._data[HELD_OUT].refused
        return tuple(refused[index] for index in self._first(limit) if index in refused)

    def _first(self, limit: int | None) -> list[int]:
        """Return the first held-out samples of each data set."""
        begin = 0
        found: list[int] = []
        for length in self._data[HELD_OUT].samples.lengths:
            found += range(begin, begin + min(length, limit or length))
            begin += length
        return found

    def close(self) -> None:
        """End the processes that decode."""
        self._source.close()

    def _plan_step(self, samples: Sequence[EncodedSample], step: int) -> PreparedStep:
        return self._runtime.plan_step(samples, step_number=step)

    def _plan_forwards(self, samples: Sequence[EncodedSample], step: int) -> PreparedStep:
        return self._runtime.plan_step(samples, forwards=True)

    def _needed(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        return self._needs.of(step)

    def _asked(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        """Return decode requirements for questions, whose labels are those of the last answer."""
        return {
            number: (parts - {TOKENS}) | {QUESTION} if TOKENS in parts else parts
            for number, parts in self._needed(step).items()
        }

    def _open_loader(self, sampler: SampleOrder, position: SamplerState, steps: int) -> Loader:
        data = self._config.data
        # With `skip`, every rank must find the same samples corrupt, so all of them decode all media.
        return Loader(
            self._samples.train,
            self._samples.encoding,
            sampler,
            position=position,
            steps=steps,
            workers=workers_of_machine(data.workers),
            on_error=data.on_error,
            parts=None if self._skips else self._needs.media | {TOKENS},
        )


class _StreamedSteps:
    """Steps of a stream, whose sizes are known only once it is read. The rank that reads leaves out bad samples."""

    def __init__(self, batches: Iterator[GlobalBatch], runtime: Runtime, begin: int) -> None:
        self._batches = batches
        self._runtime = runtime
        self._step = begin
        self.left_out: Mapping[int, str] = {}
        self.waited_seconds = 0.0

    def __next__(self) -> StepInput[PreparedStep]:
        batch = next(self._batches)
        self.waited_seconds += batch.wait_seconds
        step = self._runtime.plan_step(batch.samples, step_number=self._step)
        self._step += 1
        return StepInput(batch, step)

    def found(self) -> list[tuple[int, str]]:
        return []

    def leave_out(self, found: Iterable[tuple[int, str]]) -> None:
        pass
