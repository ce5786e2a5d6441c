"""Inputs of a rank: batches for training and evaluation, planned by the sizes of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dilatant.comm.comm import Comm
from dilatant.config import Config
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import QUESTION, TOKENS
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.training.feeding.decode_requirements import DecodeRequirements
from dilatant.training.feeding.decoding import PersistentPool, RankSource, decoding_of
from dilatant.training.feeding.feed import StepInput, StepPrefetcher, gather_bad_samples
from dilatant.training.feeding.step_data import IndexedData, StepSamples, StreamedData, draws

Steps = StepPrefetcher[PreparedStep]
"""The steps of a run."""
TRAIN, HELD_OUT = "train", "eval"
"""Keys of the data sets in the source of decoded samples."""


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
        datasets = {TRAIN: samples.train} | {name: known.samples for name, known in self._data.items()}
        self._source = RankSource(comm, datasets, samples.encoding, decoding_of(config.data), pool)

    def training(
        self,
        sampler: Sampler | StreamSampler,
        position: SamplerState,
        begin: int,
        end: int,
        left_out: Mapping[int, str],
    ) -> Steps:
        """Open steps number `begin` to `end` of an order. left_out: samples that proved bad before."""
        data: IndexedData | StreamedData
        if isinstance(sampler, StreamSampler):
            data = StreamedData(TRAIN, sampler, self._source)
            steps = data.draws(position, begin, end)
        else:
            data = self._data[TRAIN]
            steps = draws(sampler, position, begin, end)
        return StepPrefetcher(
            data,
            steps,
            self._source,
            self._plan_step,
            self._needed,
            skips=self._skips,
            left_out=left_out,
        )

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
