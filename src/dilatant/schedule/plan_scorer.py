"""Plan scoring: simulate a plan's steps on measured samples with the cost model, memory and gradient sync."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.costs.stage_costs import LayerTables, stage_costs
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.sync_time import SyncSeconds, sync_seconds
from dilatant.plan.costs.workload import Workload
from dilatant.plan.limits import LARGE_CLUSTER
from dilatant.plan.model_spec import ModelSpec, roles_of
from dilatant.plan.plan import Plan
from dilatant.schedule.assignment.assign import Policy
from dilatant.schedule.assignment.step_assignment import QUICK, Microbatching, assign_step
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import ScheduleFamily
from dilatant.schedule.packed import BACKWARD, FORWARD, WEIGHT_GRADIENT, pack, plan_arrays
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.simulator.graph import build, ops_of
from dilatant.schedule.simulator.predict import TimedStep, least_peaks, time_step
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import trainability_of

WHOLE_BACKWARD_FAMILIES = {name: FAMILIES[name] for name in ("1f1b", "half-eager", "eager")}
SPLIT_BACKWARD_FAMILIES = {name: FAMILIES[name] for name in ("zb-h1", "zb-h2")}
CANDIDATE_FAMILIES = {**WHOLE_BACKWARD_FAMILIES, **SPLIT_BACKWARD_FAMILIES}
"""The candidate families by their names in `FAMILIES`; a plan gets the fastest one that fits memory."""

INTERLEAVED_FAMILIES = {"interleaved": FAMILIES["interleaved"]}
"""The candidate families for a plan whose ranks hold several stages of a replica (interleaved)."""

PROMISING = ("eager", "zb-h2")
"""On many devices, whose steps take long to simulate, the other families are tried only if these overflow memory."""

FIRST, FRUGAL = "eager", "1f1b"
"""FIRST is simulated before the others and yields lower bounds for them; FRUGAL is the result if none fits memory."""

ROUNDING = 1.0 - 1e-9
"""Tolerance for bytes that are summed in a different order."""


def families_for(plan: Plan, splits: bool = True) -> Mapping[str, ScheduleFamily]:
    """Return the candidate families for a plan; `splits` includes those that split the backward."""
    if plan.is_interleaved:
        return INTERLEAVED_FAMILIES
    return CANDIDATE_FAMILIES if splits else WHOLE_BACKWARD_FAMILIES


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A simulated step; `schedule` is a key of `FAMILIES`, `seconds` includes summing all gradients. least: seconds
    that none of the families beats; 0 for policies that search."""

    timeline: Timeline
    seconds: float
    schedule: str
    least: float


@dataclass(frozen=True, slots=True, eq=False)
class PlanSimulator:
    """Scores plans for `plan.search` (a `PlanScorer`): the mean over the global batches in `workload`.

    `workload` must hold a whole number of global batches, one step each; otherwise PlanError is raised. `row_tokens` is
    as in `Microbatching`. `families`: those to try, or a function that returns those for a plan.
    """

    model: ModelSpec
    costs: CostModel
    cluster: Cluster
    workload: Workload
    global_batch: int
    policy: Policy = "balanced"
    rules: ParameterBytes = BF16
    seed: int = 0
    row_tokens: int | None = None
    families: Mapping[str, ScheduleFamily] | Callable[[Plan], Mapping[str, ScheduleFamily]] | None = None
    _tables: LayerTables = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.workload.steps(self.global_batch)

    def __call__(
        self,
        plan: Plan,
        num_microbatches: int,
        row_tokens: int | None = None,
        schedule: str | None = None,
        most_seconds: float = math.inf,
        /,
    ) -> PlanScore:
        try:
            steps = self.steps(plan, num_microbatches, row_tokens, schedule, most_seconds=most_seconds)
        except _TakesLongerError as slow:
            return PlanScore(slow.seconds, 0.0, 0.0, {}, (), least_seconds=slow.seconds)
        return _mean(steps, self.global_batch, roles_of(self.model).language)

    def steps(
        self,
        plan: Plan,
        num_microbatches: int,
        row_tokens: int | None = None,
        schedule: str | None = None,
        costs: StepCosts | None = None,
        most_seconds: float = math.inf,
    ) -> list[Step]:
        """Simulate one step for every global batch; arguments as in `PlanScorer`. costs: instead of the plan's own."""
        families = self.families or families_for
        tried = families(plan) if callable(families) else families
        return best_steps(
            plan,
            self.model,
            costs or step_costs(plan, self.model, self.costs, self.cluster, self.rules, self._tables),
            self.workload.steps(self.global_batch),
            self.cluster.bytes_of(plan.ranks),
            Microbatching(
                num_microbatches,
                policy=self.policy,
                seed=self.seed,
                row_tokens=min(filter(None, (self.row_tokens, row_tokens)), default=None),
            ),
            tried if schedule is None else {schedule: tried[schedule]},
            most_seconds,
        )


def step_costs(
    plan: Plan,
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster | None,
    rules: ParameterBytes = BF16,
    known_tables: LayerTables | None = None,
) -> StepCosts:
    """Return the costs of this plan's steps on `cluster`; without a cluster, messages and gradient sync take no time.
    The caller adds the squares of items and dense rows. known_tables: as in `stage_costs`. Raises UserError if the cost
    model lacks a layer type or degree."""
    return StepCosts(
        stage_costs(plan, model, costs, rules, cluster, known_tables),
        cluster=cluster,
        sync=SyncSeconds() if cluster is None else sync_seconds(plan, model, cluster, rules),
        origin=costs_text(costs),
    )


def costs_text(costs: CostModel) -> str:
    """Describe the origin of the costs as text."""
    if costs.groups:
        return ", ".join(dict.fromkeys(map(costs_text, costs.groups.values())))
    if costs.origin == "measured":
        return f"measured on {costs.hardware}{costs.unmeasured_text}"
    return f"modelled for {costs.hardware}" if costs.origin == "analytic" else f"{costs.origin}, {costs.hardware}"


class _TakesLongerError(Exception):
    """A plan's mean step takes at least so many `seconds` under every family, more than asked for."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the step takes at least {seconds} s")
        self.seconds = seconds


def best_steps(
    plan: Plan,
    model: ModelSpec,
    costs: StepCosts,
    batches: Sequence[Workload],
    bytes_per_device: float | NDArray[np.float64],
    how: Microbatching,
    families: Mapping[str, ScheduleFamily] | None = None,
    most_seconds: float = math.inf,
) -> list[Step]:
    """Simulate one step per batch under one family: the fastest of `families` on average that fits memory in all steps.

    If none fits, the most frugal family is returned; families that overflow whenever actions start are not timed. On
    many devices only the `PROMISING` families are candidates if one of them fits. `how` gives the remaining settings;
    its own family is ignored. `bytes_per_device` is one number for all, or an array in the order of `Plan.ranks`.
    Raises ValueError for a family that cannot run this plan, and _TakesLongerError as soon as all families surely take
    at least `most_seconds` on average.
    """
    families = families or families_for(plan)
    trainability = trainability_of(plan, model.trainable)
    anchor = roles_of(model).language

    assigned: dict[tuple[int, Policy, str], Assignment] = {}

    def assign(number: int, name: str, how: Microbatching) -> Assignment:
        key = number, how.policy, "" if how.policy in QUICK else name
        if key not in assigned:
            own = replace(how, family=families[name])
            assigned[key] = assign_step(plan, costs, batches[number], own, anchor)
        return assigned[key]

    scheduled: dict[tuple[int, str], Schedule] = {}

    def schedule_of(assignment: Assignment, name: str) -> Schedule:
        key = id(assignment), name
        if key not in scheduled:
            scheduled[key] = families[name](plan, assignment, trainability)
        return scheduled[key]

    built: dict[tuple[int, bytes], TimedStep] = {}

    def timed(number: int, name: str, how: Microbatching) -> TimedStep:
        assignment = assign(number, name, how)
        schedule = schedule_of(assignment, name)
        packed = pack(plan_arrays(plan), assignment, schedule)
        order = b"".join(one.tobytes() for one in (packed.offsets, packed.kind, packed.stage, packed.piece))
        key = id(assignment), order
        if key not in built:  # with few microbatches, families give the same order
            built[key] = time_step(build(plan, assignment, schedule), costs, batches[number])
        return built[key]

    # Running a searching policy for every family would dominate the time: the quick policy chooses the family first.
    searches = how.policy not in QUICK
    quickly = replace(how, policy="balanced") if searches else how
    numbers = range(len(batches))
    quick: dict[str, list[TimedStep]] = {name: [] for name in families}
    least = {name: [0.0] * len(batches) for name in families}  # seconds of each batch, or a lower bound of them

    def time_next(name: str) -> None:
        number = len(quick[name])
        quick[name].append(timed(number, name, quickly))
        least[name][number] = quick[name][number].seconds_synced

    def overflows(name: str) -> bool:
        """Return True if a batch overflows memory whenever its actions start."""
        for number, batch in enumerate(batches):
            assignment = assign(number, name, how)
            ops = ops_of(plan, assignment, schedule_of(assignment, name))
            if (least_peaks(ops, costs, batch) * ROUNDING > bytes_per_device).any():
                return True
        return False

    def check_time() -> None:
        """Raise _TakesLongerError if no family may be fast enough."""
        seconds = min(map(sum, least.values())) / len(batches)
        if not searches and seconds >= most_seconds:
            raise _TakesLongerError(seconds)

    is_tight = not searches and FIRST in families and FRUGAL in families and overflows(FIRST)
    first = FRUGAL if is_tight else FIRST
    if first in families:
        for _ in numbers:
            time_next(first)
        for number, step in enumerate(quick[first]):
            whole, split = least_seconds(step)
            for name in families:
                if name != first:
                    least[name][number] = split if name in SPLIT_BACKWARD_FAMILIES else whole
    check_time()
    tried = [name for name in families if not is_tight or name == FRUGAL or (name != FIRST and not overflows(name))]
    many = len(plan.ranks) > LARGE_CLUSTER
    queue = [(many and name not in PROMISING, sum(least[name]), number, name) for number, name in enumerate(tried)]
    heapq.heapify(queue)
    # The memory sweep costs more than all the rest: only the fastest family is swept, unless it overflows.
    frugal: list[Step] = []
    while queue:
        is_late, seconds, number, name = heapq.heappop(queue)
        if math.isinf(seconds):
            continue
        if len(quick[name]) < len(batches):
            time_next(name)
            check_time()
            heapq.heappush(queue, (is_late, sum(least[name]), number, name))
            continue
        found = [timed(batch, name, how) for batch in numbers] if searches else quick[name]
        is_last = name == FRUGAL or FRUGAL not in families
        steps: list[Step] = []
        fits = True
        for one in found:
            if fits or is_last:
                fastest = 0.0 if searches else min(own[len(steps)] for own in least.values())
                steps.append(Step(one.timeline(), one.seconds_synced, name, fastest))
                fits = fits and _fits(steps[-1], bytes_per_device)
        if fits:
            return steps
        if is_last:
            frugal = frugal or steps
    return frugal


def _fits(step: Step, bytes_per_device: float | NDArray[np.float64]) -> bool:
    peaks = step.timeline.peak_bytes
    return peaks is not None and bool((peaks <= bytes_per_device).all())


def _mean(steps: Sequence[Step], global_batch: int, anchor: str) -> PlanScore:
    seconds = float(np.mean([step.seconds for step in steps]))
    causes = steps[0].timeline.causes
    idle = np.mean([step.timeline.idle.sum(axis=0) for step in steps], axis=0)
    peaks = [step.timeline.peak_bytes for step in steps if step.timeline.peak_bytes is not None]
    counts = [len(replica) for step in steps for replica in step.timeline.assignment.microbatches[anchor]]
    return PlanScore(
        seconds=seconds,
        samples_per_second=global_batch / seconds if seconds else 0.0,
        bubble=float(np.mean([step.timeline.bubble for step in steps])),
        idle_seconds=dict(zip(causes, idle.tolist())),
        peak_bytes=tuple(np.max(peaks, axis=0).tolist()) if peaks else (),
        sync_seconds=float(np.mean([step.seconds - step.timeline.seconds for step in steps])),
        schedule=steps[0].schedule,
        num_microbatches=round(float(np.mean(counts))),
        least_seconds=float(np.mean([step.least for step in steps])),
    )


def least_seconds(step: TimedStep) -> tuple[float, float]:
    """Return lower bounds of the seconds until all gradients are summed: with whole backwards, and with split ones.

    The second is infinite if splitting cannot help: no rank waits for another, or there are no weight gradients. A rank
    begins no earlier than the first rows can reach it, then does all of its work. If all of its stages have a backward,
    its last action is a backward: after a whole one the gradient must still travel to the first stage, after split ones
    the rank must still sum its gradients.
    """
    from dilatant.schedule.rank_kernels import seconds_after, seconds_before

    graph, costs = step.graph, step.costs
    edges = graph.order, graph.offsets, graph.source, graph.edge, graph.num_messages
    ops = graph.row_op
    kind = graph.kind[ops]
    before, after = seconds_before(*edges, step.durations)[ops], seconds_after(*edges, step.durations)[ops]
    backward = np.zeros(len(graph.arrays.placed), dtype=bool)
    backward[graph.stage[graph.kind == BACKWARD]] = True
    after = np.where(kind == BACKWARD, after, np.where(backward[graph.stage[ops]], math.inf, 0.0))
    offsets = graph.packed.offsets
    some = np.flatnonzero(np.diff(offsets))
    firsts = offsets[some]
    until = np.minimum.reduceat(np.where(kind == FORWARD, before, math.inf), firsts)
    until += np.add.reduceat(step.durations[ops], firsts)
    whole = float((until + np.minimum.reduceat(after, firsts)).max(initial=0.0))
    source, target = (graph.arrays.lead[graph.stage[ops]] for ops in graph.messages)
    if not costs.stages.seconds[:, WEIGHT_GRADIENT].any() or not (source != target).any():
        return whole, math.inf
    return whole, float((until + _alone_sums(step)[some]).max(initial=0.0))


def _alone_sums(step: TimedStep) -> NDArray[np.float64]:
    """Return the gradient-sync seconds of each rank with exactly one stage, if that stage trains; else 0: [ranks]."""
    ranks = step.graph.packed.ranks
    stages: dict[int, list[int]] = {rank: [] for rank in ranks}
    for placed in step.graph.arrays.placed:
        for rank in placed.stage.ranks:
            stages[rank].append(placed.index)
    held = step.costs.stages.gradient_bytes
    return np.array(
        [
            step.costs.sync.beside.get(rank, 0.0) if len(own) == 1 and held[own[0]] > 0 else 0.0
            for rank, own in stages.items()
        ]
    )
