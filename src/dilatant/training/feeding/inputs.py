"""Inputs of a rank: batches for training and evaluation, planned by the sizes of their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dilatant.comm.comm import Comm
from dilatant.config import Config
from dilatant.data.order.blend import Blend
from dilatant.data.order.sampler import Sampler, SamplerState, StreamSampler
from dilatant.data.sample import EncodedSample
from dilatant.data.text.encoding import QUESTION, TOKENS
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.plan import PlacedStage, Plan
from dilatant.planning.assemble import Samples
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.step.step_planner import PreparedStep
from dilatant.schedule.schedule import ActionKind
from dilatant.training.feeding.decoding import PersistentPool, RankSource
from dilatant.training.feeding.feed import StepInput, StepPrefetcher, gather_bad_samples
from dilatant.training.feeding.step_data import IndexedData, StepSamples, StreamedData, draws

StageChain = tuple[str, int]
"""Unit and number of its replica."""


class DecodeRequirements:
    """Decode requirements of one rank under a plan. They are the parts of samples that its stages read (see
    `Unit.reads`), and the tokens of rows whose owners it must know."""

    def __init__(self, model: MultimodalModel, plan: Plan, rank: int) -> None:
        parts: dict[StageChain, frozenset[str]] = {}
        rows: set[StageChain] = set()
        self._divided: dict[StageChain, tuple[PlacedStage, int]] = {}
        """Replica → the stage that reads its items, and this rank's index, if context-parallel ranks divide items."""
        self._units = model.units
        for placed in plan.stages():
            if rank in placed.stage.ranks:
                read = model.units[placed.unit].reads(placed.stage.first, placed.stage.end)
                chain = placed.unit, placed.replica
                parts[chain] = parts.get(chain, frozenset()) | read
                degrees, place = placed.stage.degrees, placed.stage.ranks.index(rank)
                if degrees.row_parts > 1 and placed.unit in read:
                    self._divided[chain] = placed, degrees.row_part(place)
                rows |= _exchanged_with(model, plan, placed)
        self._parts = {chain: read for chain, read in parts.items() if read}
        self._own = tuple(parts)
        self._rows = tuple(rows)
        """Replicas of the language model with divided tokens that this rank sends rows to or receives rows from."""
        self.media = frozenset().union(*self._parts.values()) - {TOKENS}
        """Units whose media this rank reads."""

    def of(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        """Return sample number → parts, in the order in which this rank needs them: by microbatch."""
        assignment = step.assignment
        rows = [
            (position, samples, read)
            for chain, read in self._parts.items()
            for position, samples in self._read(chain, step)
        ]
        if self._rows:
            own = {
                sample
                for unit, replica in self._own
                for samples in assignment.microbatches[unit][replica]
                for sample in samples
            }
            rows += [
                (position, samples, frozenset({TOKENS}))
                for unit, replica in self._rows
                for position, samples in enumerate(assignment.microbatches[unit][replica])
                if not own.isdisjoint(samples)
            ]
        needed: dict[int, frozenset[str]] = {}
        for _, samples, read in sorted(rows, key=lambda row: row[0]):
            for sample in samples:
                needed[sample] = needed.get(sample, frozenset()) | read
        return needed

    def of_questions(self, step: PreparedStep) -> dict[int, frozenset[str]]:
        """Return `of` for questions, whose labels are those of the last answer."""
        return {
            number: (parts - {TOKENS}) | {QUESTION} if TOKENS in parts else parts
            for number, parts in self.of(step).items()
        }

    def _read(self, chain: StageChain, step: PreparedStep) -> list[tuple[int, Sequence[int]]]:
        """Return the position and samples of each microbatch that this rank reads: all, or those with items of this
        rank if context-parallel ranks divide items. A schedule may run a microbatch in parts, each of which is divided
        by itself."""
        if chain not in self._divided:
            unit, replica = chain
            return list(enumerate(step.assignment.microbatches[unit][replica]))
        placed, place = self._divided[chain]
        found: list[tuple[int, Sequence[int]]] = []
        for action in step.actions:
            if action.stage != placed.index or action.kind != ActionKind.F:
                continue
            samples = step.routes.samples[action]
            sizes = [{placed.unit: step.tokens[placed.unit][sample]} for sample in samples]
            owners = self._units[placed.unit].item_owners(sizes, placed.stage.degrees.row_parts)
            own = [sample for sample, of_items in zip(samples, owners, strict=True) if (of_items == place).any()]
            found.append((action.microbatch, own))
        return found


def _exchanged_with(model: MultimodalModel, plan: Plan, own: PlacedStage) -> set[StageChain]:
    """Return the replicas of the language model with divided tokens that another unit's stage exchanges rows with."""
    gives = own.is_last and model.graph.anchor in model.graph.feeds[own.unit]
    takes = own.is_first and own.unit in model.graph.feeds[model.graph.anchor]
    return {
        (placed.unit, placed.replica)
        for placed in plan.stages()
        if placed.unit == model.graph.anchor and placed.stage.degrees.row_parts > 1
        if (gives and placed.is_first) or (takes and placed.is_last)
    }


Steps = StepPrefetcher[PreparedStep]
"""The steps of a run."""
TRAIN, HELD_OUT = "train", "eval"
"""Keys of the data sets in the source of decoded samples."""


class RankInputs:
    """Batches of one rank; made by all ranks together. What it starts runs until `close()`, except a given `pool`."""

    def __init__(
        self, comm: Comm, runtime: Runtime, config: Config, samples: Samples, pool: PersistentPool | None = None
    ) -> None:
        self._comm = comm
        self._runtime = runtime
        self._skips = config.data.on_error == "skip"
        self._requirements = DecodeRequirements(runtime.model, runtime.plan, comm.rank)
        self._data = {
            name: IndexedData(name, blend, sizes, sizes.refused(samples.encoding.max_length))
            for name, blend, sizes in (
                (TRAIN, samples.train, samples.train_sizes),
                (HELD_OUT, samples.held_out, samples.held_out_sizes),
            )
            if isinstance(blend, Blend) and sizes is not None
        }
        datasets = {TRAIN: samples.train} | {name: known.samples for name, known in self._data.items()}
        self._source = RankSource(comm, datasets, samples.encoding, config.data, pool)

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
            lambda heads, step: self._runtime.plan_step(heads, step_number=step),
            self._requirements.of,
            skips=self._skips,
            left_out=left_out,
        )

    def held_out(
        self, limit: int | None, batch_size: int, as_questions: bool = True
    ) -> Iterator[StepInput[PreparedStep]]:
        """Yield batches of held-out samples, as questions (see `encode_sample`) or whole, without refused ones. limit:
        per data set."""
        indices = self.usable(HELD_OUT, self.first_held_out(limit))
        return self.forwards(HELD_OUT, indices, batch_size, as_questions)

    def usable(self, name: str, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those samples of a data set that are not refused."""
        refused = self._data[name].refused
        return np.array([index for index in indices.tolist() if index not in refused], np.int64)

    def forwards(
        self, name: str, indices: NDArray[np.int64], batch_size: int, as_questions: bool = False
    ) -> Iterator[StepInput[PreparedStep]]:
        """Yield batches of samples of a data set that is read by index, planned as forwards. A sample's `draw` is its
        place in `indices`."""
        data = self._data[name]
        needed = self._requirements.of_questions if as_questions else self._requirements.of
        batches = (
            StepSamples(0, indices[start : start + batch_size], start, SamplerState())
            for start in range(0, len(indices), batch_size)
        )

        def plan(heads: Sequence[EncodedSample], step: int) -> PreparedStep:
            return self._runtime.plan_step(heads, forwards=True)

        with StepPrefetcher(data, batches, self._source, plan, needed, skips=self._skips) as feed:
            while True:
                if self._skips:
                    feed.leave_out(gather_bad_samples(self._comm, feed.found()))
                step = next(feed, None)
                if step is None:
                    return
                yield step

    def use_references(self, references: Mapping[str, NDArray[np.float64]]) -> None:
        """Give the samples of each data set their references; see `IndexedData`."""
        for name, own in references.items():
            self._data[name] = replace(self._data[name], references=own)

    def refused(self, limit: int | None) -> tuple[str, ...]:
        """Return why held-out samples are left out, as far as sizes tell."""
        refused = self._data[HELD_OUT].refused
        return tuple(refused[index] for index in self.first_held_out(limit).tolist() if index in refused)

    def first_held_out(self, limit: int | None) -> NDArray[np.int64]:
        """Return the first held-out samples of each data set; none without held-out data."""
        return self._data[HELD_OUT].samples.first(limit) if HELD_OUT in self._data else np.empty(0, np.int64)

    def close(self) -> None:
        """End the processes that decode."""
        self._source.close()
