"""Step planner: turn the sizes of a global batch into the step that all ranks run, identically on every rank.

Sizes are known before a sample is decoded, so a step may be planned ahead, in another thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dilatant.config.memory_modes import Shard
from dilatant.data.sample import EncodedSample
from dilatant.models.core.unit import ModelGraph
from dilatant.plan.costs.step_costs import TOKENS
from dilatant.plan.plan import Plan
from dilatant.runtime.routes import Routes, derive_routes
from dilatant.runtime.step.agreement import digest
from dilatant.runtime.step.cost_correction import CostCorrection, RankWork
from dilatant.runtime.step.partial_step import LayerWeights, PartialStep, ReusePlan, patterns_of
from dilatant.schedule.assignment.assign import split_by_pattern
from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
from dilatant.schedule.dependencies import messages
from dilatant.schedule.families.families import gpipe
from dilatant.schedule.schedule import Action, Assignment, Schedule
from dilatant.schedule.shard_rounds import Joins, shard_rounds
from dilatant.schedule.simulator.graph import ScheduleGraph, build
from dilatant.schedule.simulator.predict import TimedStep, time_step
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import Trainability


@dataclass(frozen=True, slots=True, eq=False)
class StepPrediction:
    """Predicted times of a step. timed: the simulated step, by the costs in effect. work: uncorrected predicted costs
    of this rank's actions. origin: source of the costs. is_rough: they are neither measured nor corrected by
    measurements."""

    timed: TimedStep
    work: RankWork
    origin: str
    is_rough: bool

    @property
    def seconds(self) -> float | None:
        """Seconds from the first action to synced gradients; None if the costs are in tokens."""
        return None if self.origin == TOKENS else self.timed.seconds_synced

    def timeline(self) -> Timeline | None:
        """Return the times of all actions and the reasons for idle time; None if the costs are in tokens."""
        return None if self.origin == TOKENS else self.timed.timeline()


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """A step of one global batch, planned and compiled for one rank.

    tokens: unit → tokens of each sample. draws: by sample. actions, routes: of this rank. digests: values that all
    ranks must agree on. forwards: the step has no backward. salvaged: recovered gradients of a failed step; then only
    the missing samples run. joins: rounds of sharded weights in which this rank only takes part.
    """

    assignment: Assignment
    schedule: Schedule
    tokens: Mapping[str, tuple[int, ...]]
    draws: tuple[int, ...]
    actions: tuple[Action, ...]
    routes: Routes
    digests: Mapping[str, int]
    prediction: StepPrediction
    forwards: bool = False
    salvaged: PartialStep | None = None
    joins: Joins = field(default_factory=dict)

    def arrows(self, plan: Plan) -> list[tuple[Action, Action]]:
        """Return (producer, consumer) action pairs of the step's messages."""
        edges = messages(plan, self.assignment, self.schedule).values()
        return [(message.producer, message.consumer) for edge in edges for message in edge]

    def agreed(self, samples: Sequence[EncodedSample], number: int) -> dict[str, int]:
        """Return name → digest of everything that must be equal on all ranks before data is exchanged. samples: those
        of step `number` of the run. Raises ValueError if the step was planned for other samples."""
        if self.draws != tuple(sample.draw for sample in samples):
            raise ValueError("the step was planned for other samples than it is given")
        kept = self.salvaged
        return {
            **self.digests,
            "what is salvaged": digest("" if kept is None else f"{sorted(kept.missing)} {kept.reuse.layers}"),
            "the global batch": digest("\n".join(sample.key for sample in samples)),
            "tokens or labels": digest(np.asarray([s.content_digest for s in samples], dtype=np.int64)),
            "the step number": number,
        }


@dataclass(eq=False)
class StepPlanner:
    """Plans the steps of one rank under one plan. It keeps no state, so threads may share it."""

    _plan: Plan
    _trainability: Trainability
    _graph: ModelGraph
    _microbatching: Microbatching
    _costs: CostCorrection
    _rank: int
    _shard: Mapping[str, Shard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._with_backward = {index for index, trains in enumerate(self._trainability.backward) if trains}

    def plan_step(self, samples: Sequence[EncodedSample], step: int, forwards: bool = False) -> PreparedStep:
        """Plan step `step` of the run from a global batch. forwards: plan only forwards, of units on which the language
        model's predictions depend. Raises RuntimeError, see `CostCorrection.costs_at`."""
        idle = self._graph.behind_anchor if forwards else ()
        tokens = self._tokens(samples, idle)
        costs = self._costs.origin if forwards else self._costs.costs_at(step)
        assignment = assign_step(
            self._plan, costs, costs.workload(_arrays(tokens)), self._microbatching, self._graph.anchor
        )
        if forwards:
            return self.plan_forwards(samples, assignment, step)
        schedule = self._microbatching.family(self._plan, assignment, self._trainability)
        return self.prepare(samples, assignment, schedule, step)

    def plan_forwards(self, samples: Sequence[EncodedSample], assignment: Assignment, step: int) -> PreparedStep:
        """Plan the forwards of a given assignment."""
        nothing = (False,) * len(self._plan.stages())
        schedule = gpipe(self._plan, assignment, Trainability(nothing, nothing))
        return self.prepare(samples, assignment, schedule, step, forwards=True)

    def plan_missing(
        self,
        samples: Sequence[EncodedSample],
        reuse: ReusePlan,
        weights: LayerWeights,
        loss_layers: Mapping[str, range],
    ) -> PreparedStep:
        """Plan the missing part of a partly recovered step, see `ReusePlan.missing`. Raises the errors of
        `plan_step`."""
        all_tokens = self._tokens(samples)
        missing = sorted(reuse.missing(all_tokens, weights, loss_layers))
        costs = self._costs.costs_at(reuse.step)
        tokens = {unit: tuple(counts[sample] for sample in missing) for unit, counts in all_tokens.items()}
        fewer = -(-self._microbatching.num_microbatches * len(missing) // len(samples))
        few = assign_step(
            self._plan,
            costs,
            costs.workload(_arrays(tokens)),
            replace(self._microbatching, num_microbatches=max(1, fewer)),
            self._graph.anchor,
        )
        numbered = Assignment(
            {
                unit: tuple(
                    tuple(tuple(missing[place] for place in batch) for batch in batches) for batches in replicas
                )
                for unit, replicas in few.microbatches.items()
            }
        )
        assignment = split_by_pattern(numbered, patterns_of(missing, reuse.covered()))
        schedule = self._microbatching.family(self._plan, assignment, self._trainability)
        step = self.prepare(samples, assignment, schedule, reuse.step)
        return replace(step, salvaged=PartialStep(reuse, frozenset(missing)))

    def prepare(
        self,
        samples: Sequence[EncodedSample],
        assignment: Assignment,
        schedule: Schedule,
        step: int,
        forwards: bool = False,
    ) -> PreparedStep:
        """Compile a step from a given assignment and schedule. Raises ScheduleError if the schedule cannot run."""
        sizes = self._tokens(samples)
        tokens = self._tokens(samples, self._graph.behind_anchor) if forwards else sizes
        costs = self._costs.origin if forwards else self._costs.costs_at(step)
        graph = build(self._plan, assignment, schedule)
        timed = time_step(graph, costs, costs.workload(_arrays(tokens)))
        draws = tuple([sample.draw for sample in samples])
        return PreparedStep(
            assignment=assignment,
            schedule=schedule,
            tokens=tokens,
            draws=draws,
            actions=schedule.actions.get(self._rank, ()),
            routes=derive_routes(graph, self._rank, () if forwards else self._with_backward, timed.durations),
            digests={
                "the assignment": digest(*_assignment_arrays(assignment)),
                "the schedule": digest(*_schedule_arrays(graph)),
                "the sizes of the samples": digest(
                    *(np.asarray(values, dtype=np.int64) for values in (*sizes.values(), draws))
                ),
            },
            prediction=StepPrediction(
                timed,
                self._own_work(graph, timed),
                costs.origin,
                not costs.origin.startswith("measured") and (forwards or not self._costs.is_corrected_at(step)),
            ),
            forwards=forwards,
            joins=shard_rounds(graph, self._shard).get(self._rank, {}),
        )

    def _tokens(self, samples: Sequence[EncodedSample], idle: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        return {
            unit.name: (0,) * len(samples) if unit.name in idle else tuple([s.sizes.get(unit.name, 0) for s in samples])
            for unit in self._plan.units
        }

    def _own_work(self, graph: ScheduleGraph, timed: TimedStep) -> RankWork:
        packed = graph.packed
        if self._rank not in packed.ranks:
            return RankWork(np.empty((0, 3)), np.empty(0, dtype=np.int64))
        index = packed.ranks.index(self._rank)
        rows = slice(packed.offsets[index], packed.offsets[index + 1])
        stage, kind, piece = packed.stage[rows], packed.kind[rows], packed.piece[rows]
        seconds = self._costs.origin.stages.seconds[stage, kind]
        # Each rank that splits a microbatch's items has an equal part: measured times add up to the total.
        return RankWork(seconds * timed.pieces[piece], self._costs.group_of(stage, kind))


def _arrays(tokens: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float64]]:
    return {unit: np.asarray(counts, dtype=np.float64) for unit, counts in tokens.items()}


def _assignment_arrays(assignment: Assignment) -> list[NDArray[np.int64]]:
    """Return, by unit, the number of microbatches of each replica, the sizes of all, and their samples in order."""
    found = []
    for replicas in assignment.microbatches.values():
        batches = list(chain.from_iterable(replicas))
        numbers = map(len, replicas), map(len, batches), chain.from_iterable(batches)
        found += [np.fromiter(own, np.int64) for own in numbers]
    return found


def _schedule_arrays(graph: ScheduleGraph) -> list[NDArray[np.int64]]:
    packed = graph.packed
    pieces = packed.pieces
    arrays = (
        np.asarray(packed.ranks), packed.offsets, packed.kind, packed.stage, packed.piece,
        pieces.microbatch, pieces.first, pieces.offsets, pieces.samples,
    )  # fmt: skip
    return [np.asarray(values, dtype=np.int64) for values in arrays]
