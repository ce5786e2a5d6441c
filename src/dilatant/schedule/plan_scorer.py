"""Scoring a plan: its steps on measured samples, simulated with the cost model, memory and gradient sync."""

from __future__ import annotations

from collections.abc import Sequence
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
from dilatant.schedule.graph import build
from dilatant.schedule.predict import action_seconds, message_lag, message_sums, piece_sums, step_bytes
from dilatant.schedule.simulate import edge_lag, run, step_seconds
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import trainability_of

TRIED = {"1f1b": one_f_one_b, "half-eager": half_eager, "eager": eager}
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
) -> PlanScorer:
    """The function that scores plans for `plan.search`: the mean over the global batches in `workload`.

    `workload` holds a whole number of global batches (`Workload.batches`), one step each. Raises PlanError if not.
    """
    parts = workload.steps(global_batch)

    def score(plan: Plan, num_microbatches: int) -> PlanScore:
        steps = simulated_steps(plan, num_microbatches, model, costs, cluster, parts, policy, rules, seed)
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
) -> list[Step]:
    """One step for every global batch."""
    table = stage_costs(plan, model, costs, rules)
    sync = sync_seconds(plan, model, cluster, rules)
    return [
        best_step(plan, model, table, batch, cluster, num_microbatches, sync, policy, seed)
        for batch in batches
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One simulated step: `seconds` until all gradients are summed, `schedule` a key of `TRIED`."""

    timeline: Timeline
    seconds: float
    schedule: str


def best_step(
    plan: Plan,
    model: ModelSpec,
    costs: StageCosts,
    samples: Workload,
    cluster: Cluster,
    num_microbatches: int,
    sync: dict[int, float],
    policy: Policy = "balanced",
    seed: int = 0,
) -> Step:
    """The quickest of the families in `TRIED` that stays in memory; the most frugal if none does."""
    assignment = assign(
        plan,
        sample_seconds(plan, costs, samples),
        num_microbatches,
        policy,
        seed,
        anchor=roles_of(model).language,
    )
    trainability = trainability_of(plan, model.trainable)
    graphs = {}
    for name, family in TRIED.items():
        graph = build(plan, assignment, family(plan, assignment, trainability))
        sums = piece_sums(graph, samples.tokens, samples.squares, samples.dense)
        messages = message_sums(graph, samples.tokens, samples.squares)
        size = step_bytes(graph, costs, sums, messages)
        seconds = action_seconds(graph, costs, sums)
        lag = message_lag(graph, size.message, cluster)
        graphs[name] = step_seconds(graph, seconds, edge_lag(graph, lag)), graph, seconds, lag, size
    # The memory sweep costs more than all the rest: only the quickest is swept, unless it overflows.
    step = None
    for name in sorted(graphs, key=lambda name: graphs[name][0]):
        _, graph, seconds, lag, size = graphs[name]
        timeline = run(graph, seconds, lag=lag, size=size)
        assert timeline.peak_bytes is not None, "the sweep was asked for"
        if step is None or name == FRUGAL:
            step = Step(timeline, _until_synced(timeline, sync), name)
        if float(timeline.peak_bytes.max()) <= cluster.bytes_per_device:
            return Step(timeline, _until_synced(timeline, sync), name)
    assert step is not None, "TRIED is not empty"
    return step


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
        schedule=max((step.schedule for step in steps), key=[step.schedule for step in steps].count),
    )
