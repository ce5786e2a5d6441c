"""From the sizes of a global batch to its Assignment and Schedule: the same on every rank, from the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dilatant.data.sample import EncodedSample
from dilatant.models.graph import ModelGraph
from dilatant.plan.plan import Plan
from dilatant.schedule.assign import Policy
from dilatant.schedule.distribute import assign
from dilatant.schedule.families import gpipe, one_f_one_b
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.trainability import Trainability

Family = Callable[[Plan, Assignment, Trainability], Schedule]


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a global batch becomes microbatches, and in which order ranks run them.

    num_microbatches: of each replica of the anchor (the language model), or more where the token budget asks for them.
    row_tokens: the token budget, most tokens of the anchor in one microbatch; a longer sample is alone in its own.
    """

    num_microbatches: int = 1
    family: Family = one_f_one_b
    policy: Policy = "balanced"
    seed: int = 0
    row_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """tokens: unit → of each sample, what the unit processes."""

    assignment: Assignment
    schedule: Schedule
    tokens: dict[str, tuple[int, ...]] = field(compare=False)


class StepPlanner:
    """Plans the steps of one run under one plan."""

    def __init__(
        self, plan: Plan, trainability: Trainability, graph: ModelGraph, microbatching: Microbatching
    ) -> None:
        self._plan = plan
        self._trainability = trainability
        self._graph = graph
        self._microbatching = microbatching
        self._last: PlannedStep | None = None

    def plan_step(self, samples: Sequence[EncodedSample]) -> PlannedStep:
        """The step of a global batch. Equal assignments give the same objects, which a runtime prepares once."""
        assignment, tokens = self._assign(samples)
        last = self._last
        if last is not None and last.assignment == assignment:
            assignment, schedule = last.assignment, last.schedule
        else:
            schedule = self._microbatching.family(self._plan, assignment, self._trainability)
        self._last = PlannedStep(assignment, schedule, tokens)
        return self._last

    def plan_forwards(self, samples: Sequence[EncodedSample]) -> PlannedStep:
        """As `plan_step`, with forwards only, and only of what the anchor's answers hang on."""
        assignment, tokens = self._assign(samples, idle=self._graph.behind_anchor)
        nothing = (False,) * len(self._plan.stages())
        return PlannedStep(
            assignment, gpipe(self._plan, assignment, Trainability(nothing, nothing, nothing)), tokens
        )

    def _assign(
        self, samples: Sequence[EncodedSample], idle: Sequence[str] = ()
    ) -> tuple[Assignment, dict[str, tuple[int, ...]]]:
        tokens = {
            unit.name: tuple(0 if unit.name in idle else sample.sizes.get(unit.name, 0) for sample in samples)
            for unit in self._plan.units
        }
        how = self._microbatching
        assignment = assign(
            self._plan,
            tokens,
            how.num_microbatches,
            how.policy,
            how.seed,
            anchor=self._graph.anchor,
            weight=None if how.row_tokens is None else tokens[self._graph.anchor],
            capacity=how.row_tokens,
        )
        return assignment, tokens
