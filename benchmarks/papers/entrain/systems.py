"""Entrain (thesis chapter 4): how each system divides a batch, forms microbatches and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.datasets import Sizes
from benchmarks.papers.disttrain.order import disttrain
from benchmarks.papers.entrain.stability import language_factor, work
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.assign import assign_microbatches
from dilatant.schedule.assignment.entrain import entrain as entrain_policy
from dilatant.schedule.assignment.pipeline_shape import ByUnit, PipelineShape, shape_seconds
from dilatant.schedule.families.families import eager, eager_depths, one_f_one_b, path_depths
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.simulator.simulate import simulate
from dilatant.schedule.timeline import Timeline

# Stages (encoder, LLM) of DistTrain and of Entrain, thesis Tables 4.1 and C.1; DIP has both units on all eight stages.
LAYOUTS = {
    ("SynthChartNet", "1b"): ((4, 4), (5, 3)),
    ("LLaVA-150k", "1b"): ((5, 3), (4, 4)),
    ("ChartQA", "1b"): ((5, 3), (5, 3)),
    ("CocoQA", "1b"): ((4, 4), (5, 3)),
    ("SynthChartNet", "3b"): ((5, 3), (4, 4)),
    ("LLaVA-150k", "3b"): ((4, 4), (3, 5)),
    ("ChartQA", "3b"): ((4, 4), (4, 4)),
    ("CocoQA", "3b"): ((4, 4), (3, 5)),
}
BATCH, REPLICAS, MICROBATCHES, STAGES, _TENSOR = 512, 4, 32, 8, 2
_BACKWARD = 2.0  # forwards; everything is trained
_STEPS = 2  # global batches averaged

Microbatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One global batch on one system: seconds of the slowest replica, forward seconds of every microbatch by unit, and
    the most encoder activations that a rank holds at once, in mean microbatches."""

    seconds: float
    forward: tuple[NDArray[np.float64], NDArray[np.float64]]
    held: float


@dataclass(frozen=True, slots=True)
class _System:
    """How a system divides a batch among replicas, forms microbatches and orders them."""

    name: str
    divide: Callable[[NDArray[np.float64]], Sequence[NDArray[np.int64]]]
    run: Callable[[NDArray[np.float64], tuple[int, int]], tuple[Timeline, Microbatches, Microbatches]]


def compare(shared: Path, sizes: Sizes, key: tuple[str, str]) -> dict[str, list[Step]]:
    """Every system on the same global batches."""
    seconds = seconds_of(shared, sizes, key[1])
    theirs, entrains = LAYOUTS[key]
    layouts = {"DistTrain": theirs, "DIP-like": (STAGES, STAGES), "Entrain": entrains}
    layouts[LAYOUT] = layouts[SAME] = entrains
    layouts[FREE] = best_split(seconds)
    draw = np.random.default_rng(1)
    found: dict[str, list[Step]] = {name: [] for name in layouts}
    for _ in range(_STEPS):
        batch = seconds[draw.integers(len(seconds), size=BATCH)]
        for system in SYSTEMS:
            found[system.name].append(_step(system, batch, layouts[system.name]))
    return found


def seconds_of(shared: Path, sizes: Sizes, llm: str) -> NDArray[np.float64]:
    """Forward seconds of every sample in the whole encoder and the whole LLM: `[samples, 2]`."""
    return work(sizes, llm) * (1.0, language_factor(shared, llm)) / _TENSOR


def best_split(seconds: NDArray[np.float64]) -> tuple[int, int]:
    """The split of the stages that simulates fastest on samples that are not in the compared batches."""
    batch = seconds[np.random.default_rng(99).integers(len(seconds), size=BATCH // REPLICAS)]
    run = _ours("balanced")
    return min(
        ((encoder, STAGES - encoder) for encoder in range(1, STAGES)), key=lambda split: run(batch, split)[0].seconds
    )


def _step(system: _System, batch: NDArray[np.float64], layout: tuple[int, int]) -> Step:
    times, forwards, held = [], ([], []), 0.0
    for own in system.divide(batch):
        part = batch[own]
        timeline, encoder, language = system.run(part, layout)
        times.append(timeline.seconds)
        for unit, microbatches in enumerate((encoder, language)):
            forwards[unit].extend(part[list(one), unit].sum() for one in microbatches if one)
        held = max(held, _held(timeline, part[:, 0]) / (part[:, 0].sum() / MICROBATCHES))
    return Step(max(times), (np.asarray(forwards[0]), np.asarray(forwards[1])), held)


def simulate_step(part: NDArray[np.float64], plan: Plan, assignment: Assignment, schedule: Schedule) -> Timeline:
    """Simulate: a stage takes its share of its unit's forward, the backward `_BACKWARD` times that."""
    placed = plan.stages()
    depth = {unit.name: len(unit.replicas[0].stages) for unit in plan.units}

    def seconds(action: Action) -> float:
        stage = placed[action.stage]
        samples = action.samples or assignment.microbatches[stage.unit][0][action.microbatch]
        whole = float(part[list(samples), 0 if stage.unit == "encoder" else 1].sum()) / depth[stage.unit]
        return whole * (_BACKWARD if action.kind == "B" else 1.0)

    return simulate(schedule, plan, assignment, seconds)


def plan_of(layout: tuple[int, int]) -> Plan:
    encoder = tuple(Stage(i, i + 1, (i,)) for i in range(layout[0]))
    language = tuple(Stage(i, i + 1, (layout[0] + i,)) for i in range(layout[1]))
    return Plan((UnitPlan("encoder", (Replica(encoder),), ("language",)), UnitPlan("language", (Replica(language),))))


def _shape(layout: tuple[int, int]) -> PipelineShape:
    return PipelineShape(layout, ((1,), ()), (_BACKWARD, _BACKWARD), (0.0, 0.0))


def _per_stage(part: NDArray[np.float64], layout: tuple[int, int]) -> NDArray[np.float64]:
    return part * (1.0 + _BACKWARD) / np.asarray(layout)


def _disttrain(part: NDArray[np.float64], layout: tuple[int, int]) -> tuple[Timeline, Microbatches, Microbatches]:
    """Random groups of equal count in DistTrain's order, plain 1F1B."""
    found = assign_microbatches(_per_stage(part, layout), MICROBATCHES, disttrain, shape=_shape(layout))
    return _shared_groups(part, layout, found[0], eagerly=False)


def _shared_groups(
    part: NDArray[np.float64], layout: tuple[int, int], groups: Microbatches, eagerly: bool
) -> tuple[Timeline, Microbatches, Microbatches]:
    plan, assignment = plan_of(layout), Assignment({"encoder": (groups,), "language": (groups,)})
    schedule = (eager if eagerly else one_f_one_b)(plan, assignment)
    return simulate_step(part, plan, assignment, schedule), groups, groups


def entrain(part: NDArray[np.float64], layout: tuple[int, int]) -> tuple[Timeline, Microbatches, Microbatches]:
    """Hierarchical assignment with pairwise deferral, backwards split by deferral, forwards eager."""
    found = assign_microbatches(_per_stage(part, layout), MICROBATCHES, entrain_policy, shape=_shape(layout))
    encoder, language = (tuple(one for one in found[unit] if one) for unit in (0, 1))
    plan, assignment = plan_of(layout), Assignment({"encoder": (encoder,), "language": (language,)})
    return simulate_step(part, plan, assignment, eager(plan, assignment)), encoder, language


def _ours(
    policy: str, own_depths: bool = True
) -> Callable[[NDArray[np.float64], tuple[int, int]], tuple[Timeline, Microbatches, Microbatches]]:
    """Our microbatches, run eagerly: to the depths that their search found, or as deep as Entrain's."""

    def run(part: NDArray[np.float64], layout: tuple[int, int]) -> tuple[Timeline, Microbatches, Microbatches]:
        found = assign_microbatches(_per_stage(part, layout), MICROBATCHES, policy, shape=_shape(layout))
        encoder, language = (tuple(one for one in found[unit] if one) for unit in (0, 1))
        plan, assignment = plan_of(layout), Assignment({"encoder": (encoder,), "language": (language,)})
        schedule = eager(plan, assignment)
        if own_depths and policy == "searched":
            depths = shallowest_depths(_shape(layout), _per_stage(part, layout), found)
            schedule = eager(plan, assignment, depths=depths)
        return simulate_step(part, plan, assignment, schedule), encoder, language

    return run


def shallowest_depths(shape: PipelineShape, seconds: NDArray[np.float64], found: ByUnit) -> tuple[int, ...]:
    """Return the smallest in-flight depths by stage, between those of 1F1B and of eager 1F1B, that cost no time."""
    plan = shape.plan()
    deepest, least = np.asarray(eager_depths(plan)), np.asarray(path_depths(plan))
    best, taken = tuple(deepest.tolist()), shape_seconds(shape, seconds, found)
    for share in (0.5, 0.0):
        depths = tuple((least + np.floor(share * (deepest - least))).astype(int).tolist())
        own = shape_seconds(replace(shape, family=partial(eager, depths=depths)), seconds, found)
        if own <= taken:
            best, taken = depths, own
    return best


def _dip(part: NDArray[np.float64], layout: tuple[int, int]) -> tuple[Timeline, Microbatches, Microbatches]:
    """Both units on every stage: all encoder forwards, then 1F1B of the LLM, then all encoder backwards (Fig. 4.2c)."""
    groups = tuple(
        tuple(range(first, min(first + len(part) // MICROBATCHES, len(part))))
        for first in range(0, len(part), len(part) // MICROBATCHES)
    )
    stages = tuple(Stage(i, i + 1, (i,)) for i in range(STAGES))
    plan = Plan((UnitPlan("encoder", (Replica(stages),), ("language",)), UnitPlan("language", (Replica(stages),))))
    assignment = Assignment({"encoder": (groups,), "language": (groups,)})
    actions = {}
    for stage in range(STAGES):
        warm = min(STAGES - stage, len(groups))
        order = [Action(ActionKind.F, stage, k) for k in range(len(groups))]
        order += [Action(ActionKind.F, STAGES + stage, k) for k in range(warm)]
        for k in range(len(groups)):
            order.append(Action(ActionKind.B, STAGES + stage, k))
            if warm + k < len(groups):
                order.append(Action(ActionKind.F, STAGES + stage, warm + k))
        actions[stage] = (*order, *(Action(ActionKind.B, stage, k) for k in range(len(groups))))
    return simulate_step(part, plan, assignment, Schedule(actions)), groups, groups


def _by_count(batch: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    return [np.arange(replica, len(batch), REPLICAS) for replica in range(REPLICAS)]


def _by_total(batch: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """DistTrain's intra-microbatch reordering: greedy over total work, largest first (Alg. 2 sorts ascending, D1)."""
    return _greedy(batch.sum(axis=1), batch.sum(axis=1))


def _by_encoder(batch: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Entrain 4.3: by falling encoder work, each to the replica with the least LLM work."""
    return _greedy(batch[:, 0], batch[:, 1])


def _by_both(batch: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    groups = assign_microbatches(batch, REPLICAS, "balanced")[0]
    return [np.asarray(group) for group in groups]


def _greedy(order_by: NDArray[np.float64], load: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    sums, groups = np.zeros(REPLICAS), [[] for _ in range(REPLICAS)]
    for sample in np.argsort(-order_by, kind="stable").tolist():
        replica = int(sums.argmin())
        sums[replica] += load[sample]
        groups[replica].append(sample)
    return [np.asarray(sorted(group)) for group in groups]


SAME, LAYOUT, FREE = "ours, its layout and schedule", "ours, Entrain's layout", "ours, searched"
SYSTEMS = (
    _System("DistTrain", _by_total, _disttrain),
    _System("DIP-like", _by_count, _dip),
    _System("Entrain", _by_encoder, entrain),
    _System(SAME, _by_both, _ours("balanced", own_depths=False)),
    _System(LAYOUT, _by_both, _ours("searched")),
    _System(FREE, _by_both, _ours("searched")),
)


def _held(timeline: Timeline, encoder_seconds: NDArray[np.float64]) -> float:
    """The most encoder work whose activations one rank holds at once."""
    placed = timeline.plan.stages()
    most = 0.0
    for rank in timeline.ranks:
        now = 0.0
        for action, _, _ in timeline.of_rank(rank):
            stage = placed[action.stage]
            if stage.unit != "encoder":
                continue
            samples = action.samples or timeline.assignment.microbatches["encoder"][0][action.microbatch]
            amount = float(encoder_seconds[list(samples)].sum())
            now += amount if action.kind == "F" else -amount
            most = max(most, now)
    return most
