"""Scoring a plan: its steps on measured samples, simulated with the cost model, memory and gradient sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.cost.model import CostModel
from dilatant.plan.candidates import roles_of
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.plan import Plan
from dilatant.plan.score import PlanScore, PlanScorer
from dilatant.plan.stage_costs import StageCosts, stage_costs
from dilatant.plan.sync_time import sync_seconds
from dilatant.plan.workload import Workload
from dilatant.schedule.assign import Policy
from dilatant.schedule.distribute import assign
from dilatant.schedule.families import eager, half_eager, one_f_one_b
from dilatant.schedule.graph import ScheduleGraph, build
from dilatant.schedule.memory_sweep import StepBytes
from dilatant.schedule.predict import action_seconds, message_lag, message_sums, piece_sums, step_bytes
from dilatant.schedule.schedule import Assignment, Schedule
from dilatant.schedule.simulate import edge_lag, run, step_seconds
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import Trainability, trainability_of

Family = Callable[[Plan, Assignment, Trainability], Schedule]
"""A schedule family, as in `schedule.FAMILIES`."""

TRIED: Mapping[str, Family] = {"1f1b": one_f_one_b, "half-eager": half_eager, "eager": eager}
"""The families among which a plan is given the quickest that fits memory, by the names of `schedule.FAMILIES`."""

FRUGAL = "1f1b"


def plan_scorer(
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    workload: Workload,
    global_batch: int,
    policy: Policy = "balanced",
    rules: ParameterBytes = BF16,
    seed: int = 0,
    families: Mapping[str, Family] = TRIED,
) -> PlanScorer:
    """The function that scores plans for `plan.search`: the mean over the global batches in `workload`.

    `workload` holds a whole number of global batches (`Workload.batches`), one step each. families: as in `best_steps`.
    Raises PlanError if not.
    """
    parts = workload.steps(global_batch)

    def score(plan: Plan, num_microbatches: int) -> PlanScore:
        steps = simulated_steps(
            plan, num_microbatches, model, costs, cluster, parts, policy, rules, seed, families
        )
        return _mean(steps, global_batch)

    return score


def simulated_steps(
    plan: Plan,
    num_microbatches: int,
    model: ModelSpec,
    costs: CostModel,
    cluster: Cluster,
    batches: Sequence[Workload],
    policy: Policy = "balanced",
    rules: ParameterBytes = BF16,
    seed: int = 0,
    families: Mapping[str, Family] = TRIED,
) -> list[Step]:
    """One step for every global batch."""
    table = stage_costs(plan, model, costs, rules)
    sync = sync_seconds(plan, model, cluster, rules)
    return best_steps(plan, model, table, batches, cluster, num_microbatches, sync, policy, seed, families)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One simulated step: `seconds` until all gradients are summed, `schedule` a key of `schedule.FAMILIES`."""

    timeline: Timeline
    seconds: float
    schedule: str


@dataclass(frozen=True, slots=True, eq=False)
class _TimedGraph:
    """A schedule of one batch with all that its simulation needs; `seconds` without gradient sync."""

    graph: ScheduleGraph
    durations: NDArray[np.float64]
    lag: NDArray[np.float64]
    size: StepBytes
    seconds: float


def best_steps(
    plan: Plan,
    model: ModelSpec,
    costs: StageCosts,
    batches: Sequence[Workload],
    cluster: Cluster,
    num_microbatches: int,
    sync: dict[int, float],
    policy: Policy = "balanced",
    seed: int = 0,
    families: Mapping[str, Family] = TRIED,
) -> list[Step]:
    """One step for every batch, all of one family: the quickest of `families`, on average, that stays in memory in each
    of them; the most frugal if none does. Raises ValueError for a family that cannot run this plan."""
    trainability = trainability_of(plan, model.trainable)
    timed: dict[str, list[_TimedGraph]] = {name: [] for name in families}
    for batch in batches:
        assignment = assign(
            plan,
            sample_seconds(plan, costs, batch),
            num_microbatches,
            policy,
            seed,
            anchor=roles_of(model).language,
        )
        for name, family in families.items():
            graph = build(plan, assignment, family(plan, assignment, trainability))
            timed[name].append(_timed(graph, costs, batch, cluster))
    # The memory sweep costs more than all the rest: only the quickest family is swept, unless it overflows.
    for name in sorted(families, key=lambda name: sum(one.seconds for one in timed[name])):
        steps: list[Step] = []
        for one in timed[name]:
            step = _step(one, sync, name)
            assert step.timeline.peak_bytes is not None, "the sweep was asked for"
            if float(step.timeline.peak_bytes.max()) > cluster.bytes_per_device:
                break
            steps.append(step)
        else:
            return steps
    frugal = FRUGAL if FRUGAL in timed else next(iter(timed))
    return [_step(one, sync, frugal) for one in timed[frugal]]


def _timed(graph: ScheduleGraph, costs: StageCosts, batch: Workload, cluster: Cluster) -> _TimedGraph:
    sums = piece_sums(graph, batch.tokens, batch.squares, batch.dense)
    size = step_bytes(graph, costs, sums, message_sums(graph, batch.tokens, batch.squares))
    durations = action_seconds(graph, costs, sums)
    lag = message_lag(graph, size.message, cluster)
    return _TimedGraph(graph, durations, lag, size, step_seconds(graph, durations, edge_lag(graph, lag)))


def _step(one: _TimedGraph, sync: dict[int, float], schedule: str) -> Step:
    timeline = run(one.graph, one.durations, lag=one.lag, size=one.size)
    return Step(timeline, _until_synced(timeline, sync), schedule)


def sample_seconds(plan: Plan, costs: StageCosts, samples: Workload) -> dict[str, NDArray[np.float64]]:
    """By unit: forward plus backward of each sample on the unit's mean stage, [samples]; 0 without tokens."""
    seconds = {}
    for unit in plan.units:
        stages = [
            placed.index for placed in plan.stages() if placed.unit == unit.name and placed.replica == 0
        ]
        square, linear, _ = (costs.seconds[stages, 0] + costs.seconds[stages, 1]).mean(axis=0)
        tokens = np.asarray(samples.tokens[unit.name], dtype=np.float64)
        squares = np.asarray(samples.squares.get(unit.name, tokens**2), dtype=np.float64)
        # Work that costs nothing per token must still be done: keep it above 0.
        seconds[unit.name] = np.where(tokens > 0, np.maximum(square * squares + linear * tokens, 1e-12), 0.0)
    return seconds


def _until_synced(timeline: Timeline, sync: dict[int, float]) -> float:
    """When the last rank has summed its gradients; each begins at the end of its last action."""
    last = [
        float(timeline.end[timeline.offsets[k] : timeline.offsets[k + 1]].max(initial=0.0)) + sync[rank]
        for k, rank in enumerate(timeline.ranks)
    ]
    return max(timeline.seconds, *last)


def _mean(steps: Sequence[Step], global_batch: int) -> PlanScore:
    seconds = float(np.mean([step.seconds for step in steps]))
    causes = steps[0].timeline.causes
    idle = np.mean([step.timeline.idle.sum(axis=0) for step in steps], axis=0)
    peaks = [step.timeline.peak_bytes for step in steps if step.timeline.peak_bytes is not None]
    return PlanScore(
        seconds=seconds,
        samples_per_second=global_batch / seconds if seconds else 0.0,
        bubble=float(np.mean([step.timeline.bubble for step in steps])),
        idle_seconds=dict(zip(causes, idle.tolist())),
        peak_bytes=tuple(np.max(peaks, axis=0).tolist()) if peaks else (),
        sync_seconds=float(np.mean([step.seconds - step.timeline.seconds for step in steps])),
        schedule=steps[0].schedule,
    )
