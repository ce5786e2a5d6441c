"""The Assignment of a step: samples over the replicas of every unit, and over the microbatches of each replica.

The replicas of the *anchor*, the unit that the encoders feed (the language model), each take a part of the samples and
group them by one of the microbatch policies. Every other unit follows, with any number of replicas: their greatest
common divisor is the number of parts of a plan, and the replicas of a part divide the k-th microbatches of its anchor
replicas evenly. With fewer encoder replicas than language-model replicas, the encoder's microbatches are that much
larger (DistTrain 5.1).

Planner and training use one function, `assign_step`, with the same costs.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.errors import UserError
from dilatant.plan.costs.stage_costs import StageCosts
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.workload import Workload, rows_of
from dilatant.plan.plan import PlacedStage, Plan, Replica
from dilatant.schedule.assignment.assign import (
    Policy,
    assign_microbatches,
    balanced_replicas,
    order_of,
    split_by_pattern,
)
from dilatant.schedule.assignment.pipeline_shape import ByUnit, PipelineShape
from dilatant.schedule.families.families import ScheduleFamily, one_f_one_b
from dilatant.schedule.schedule import Assignment, Microbatch


@dataclass(frozen=True, slots=True)
class Microbatching:
    """Settings for dividing a global batch into microbatches and ordering them on ranks.

    `num_microbatches` is per replica of the anchor (the language model); the token budget may require more.
    `row_tokens` is that budget, the most anchor tokens in one row; a longer sample is alone in its own. A microbatch is
    one row, or one in each group of ranks that divide its samples: their mean meets the budget. `alone` puts every
    sample into a separate microbatch, after grouping samples as usual for balance.
    """

    num_microbatches: int = 1
    family: ScheduleFamily = one_f_one_b
    policy: Policy = "balanced"
    seed: int = 0
    row_tokens: int | None = None
    alone: bool = False


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Times of a unit besides the seconds of its samples. `backward` is per forward second, `fixed` per microbatch and
    stage. `paces` has, by replica, the seconds of a stage there relative to the unit's first replica (empty: from its
    number of layers alone)."""

    backward: float = 2.0
    fixed: float = 0.0
    paces: Sequence[float] = ()


QUICK: tuple[Policy, ...] = ("random", "balanced")
"""The policies that give the same groups for every family; the others simulate the schedule to group samples."""


def assign_step(plan: Plan, costs: StepCosts, samples: Workload, how: Microbatching, anchor: str) -> Assignment:
    """Return the Assignment of a global batch, balanced in the seconds of `costs`. These follow the frozen rule (only
    forwards for a unit without backward), with quadratic attention, fixed costs per microbatch and the token budget.
    Policies that simulate do so under the family that runs.

    Samples stay in their global batch. Raises UserError as `assign` does.
    """
    placed = plan.stages()
    whole = _batch_seconds(plan, placed, costs.stages, samples)
    assignment = assign(
        plan,
        sample_seconds(plan, costs.stages, samples),
        how,
        anchor=anchor,
        speed=_speeds(plan, anchor, placed, whole),
        times={unit.name: _unit_times(unit.name, placed, costs.stages, samples, whole) for unit in plan.units},
        tokens=samples.tokens[anchor],
    )
    count = len(samples.tokens[anchor])
    return split_by_pattern(assignment, dict(enumerate(range(count)))) if how.alone else assignment


def assign(
    plan: Plan,
    seconds: Mapping[str, ArrayLike],
    how: Microbatching,
    *,
    anchor: str | None = None,
    speed: Sequence[float] | None = None,
    times: Mapping[str, UnitTimes] | None = None,
    tokens: ArrayLike | None = None,
) -> Assignment:
    """Assign samples to the microbatches of every replica of every unit.

    `seconds[unit][sample]` is the time of a sample on a typical stage of the unit, forward plus backward, 0 where
    it has no work there: such a sample is absent from that unit's microbatches (without work anywhere, it stays in the
    anchor's). `speed` is the anchor replicas' relative throughput, by default equal. `anchor` defaults to the unit that
    most others feed.
    With a token budget, the `tokens[sample]` of an anchor's rows add up to at most `how.row_tokens` on average. Raises
    UserError if a unit is missing or lists differ in length.
    """
    names = [unit.name for unit in plan.units]
    missing = [name for name in names if name not in seconds]
    if missing:
        raise UserError(f"seconds says nothing about units {missing}")
    table = np.stack([np.asarray(seconds[name], dtype=np.float64) for name in names], axis=1)
    fed = [sum(name in unit.feeds for unit in plan.units) for name in names]
    center = fed.index(max(fed)) if anchor is None else names.index(anchor)
    replicas = len(plan.units[center].replicas)
    rates = [1.0] * replicas if speed is None else list(speed)
    if len(rates) != replicas:
        raise UserError(f"{names[center]} has {replicas} replicas, but there are {len(rates)} speeds")
    replica_of = split_over_replicas(table, rates)

    limit, weights = np.inf, np.zeros(len(table))
    if tokens is not None and how.row_tokens is not None:
        # Clipped: a sample above the budget fills a row, and nothing joins it.
        rows = min(stage.degrees.groups for replica in plan.units[center].replicas for stage in replica.stages)
        limit, weights = rows * how.row_tokens, np.minimum(np.asarray(tokens, dtype=np.float64), how.row_tokens)
    samples, first = order_of(replica_of, replicas), np.append(0, np.cumsum(np.bincount(replica_of, None, replicas)))
    of_replica = [samples[start:end] for start, end in itertools.pairwise(first.tolist())]
    counts, packed = np.full(replicas, how.num_microbatches), np.zeros(len(table), dtype=np.int64)
    if limit < np.inf:
        row_of = [rows_of(weights[mine], limit) for mine in of_replica]
        counts = np.array([max(how.num_microbatches, int(own.max(initial=-1)) + 1) for own in row_of])
        packed = np.concatenate(row_of)
    # A replica that serves several anchor replicas merges their microbatches: its seconds are multiplied.
    serving, paces = _serving(plan, replicas, times or {})
    scale = paces * replicas / [len(unit.replicas) for unit in plan.units]

    def group(replica: int) -> tuple[NDArray[np.int64], ByUnit]:
        mine, here = of_replica[replica], [unit.replicas[own] for unit, own in zip(plan.units, serving[replica])]
        shape = _pipeline(plan, here, paces[replica].tolist(), times or {}, how.family)
        own, count, seed = table[mine] * scale[replica], int(counts[replica]), how.seed + replica
        return mine, assign_microbatches(
            own, count, how.policy, seed, shape=shape, weight=weights[mine], capacity=limit
        )

    together = None
    if how.policy == "balanced":
        together = balanced_replicas(table, scale, samples, first, counts, weights, limit, packed)
    slots = [together or []] * len(names)
    if together is None:
        # The search runs in compiled code that releases the GIL; replicas are independent of each other.
        threads = min(replicas, os.cpu_count() or 1) if how.policy == "searched" else 1
        with ThreadPoolExecutor(threads, "assign") as pool:
            grouped = list(pool.map(group, range(replicas)))
        slots = [
            [[tuple(mine[list(batch)].tolist()) for batch in found[unit]] for mine, found in grouped]
            for unit in range(len(names))
        ]
    present = table > 0
    present[~present.any(axis=1), center] = True
    return Assignment(
        {
            name: _spread(table[:, unit], present[:, unit], slots[unit], len(plan.units[unit].replicas))
            for unit, name in enumerate(names)
        }
    )


def _serving(plan: Plan, anchors: int, times: Mapping[str, UnitTimes]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return, by unit, the replica that serves each of the `anchors` replicas of the anchor: `[anchors, units]`. The
    second array has the seconds of a stage there, relative to a stage of the unit's first replica."""
    serving, paces = [], []
    for unit in plan.units:
        count, known = len(unit.replicas), times[unit.name].paces if unit.name in times else ()
        if not len(known):
            known = [len(unit.replicas[0].stages) / len(replica.stages) for replica in unit.replicas]
        anchor = np.arange(anchors)
        serving.append(anchor * count // anchors if count <= anchors else -(-anchor * count // anchors))
        paces.append(np.asarray(known, dtype=np.float64)[serving[-1]])
    return np.stack(serving, axis=1), np.stack(paces, axis=1)


def _pipeline(
    plan: Plan, here: Sequence[Replica], paces: Sequence[float], times: Mapping[str, UnitTimes], family: ScheduleFamily
) -> PipelineShape:
    """Return the pipeline of one replica of each unit; `paces` is as in `_serving`."""
    number = {unit.name: index for index, unit in enumerate(plan.units)}
    own = [times.get(unit.name, UnitTimes()) for unit in plan.units]
    return PipelineShape(
        stages=tuple(len(replica.stages) for replica in here),
        feeds=tuple(tuple(number[target] for target in unit.feeds) for unit in plan.units),
        backward=tuple(time.backward for time in own),
        fixed_seconds=tuple(time.fixed * pace for time, pace in zip(own, paces)),
        family=family,
        ranks=tuple(stage.ranks[0] for replica in here for stage in replica.stages),
    )


def sample_seconds(plan: Plan, costs: StageCosts, samples: Workload) -> dict[str, NDArray[np.float64]]:
    """Return, by unit, forward plus backward seconds of each sample on the mean stage of the unit's first replica,
    [samples]; 0 without tokens."""
    seconds = {}
    for unit in plan.units:
        stages = [one.index for one in plan.stages() if one.unit == unit.name and one.replica == 0]
        square, linear, _ = (costs.seconds[stages, 0] + costs.seconds[stages, 1]).mean(axis=0)
        squares, tokens = samples.of_samples(unit.name)
        # A sample with tokens must get more than 0 seconds: 0 means that it has no work here.
        seconds[unit.name] = np.where(tokens > 0, np.maximum(square * squares + linear * tokens, 1e-12), 0.0)
    return seconds


def _unit_times(
    unit: str, placed: Sequence[PlacedStage], costs: StageCosts, samples: Workload, seconds: NDArray[np.float64]
) -> UnitTimes:
    """Return the unit's times on this batch, which takes `seconds` [stages]; paces are of its mean stages."""
    mine = [one for one in placed if one.unit == unit]
    stages = [one.index for one in mine if one.replica == 0]
    squares, tokens = samples.of_samples(unit)
    forward, backward = (
        float((costs.seconds[stages, kind] @ [squares.sum(), tokens.sum(), 0.0]).sum()) for kind in (0, 1)
    )
    fixed = float((costs.seconds[stages, 0, 2] + costs.seconds[stages, 1, 2]).mean())
    replica = [one.replica for one in mine]
    mean = np.bincount(replica, seconds[[one.index for one in mine]]) / np.bincount(replica)
    paces = mean / mean[0] if mean[0] > 0.0 else np.ones(len(mean))
    return UnitTimes(backward / forward if forward else 2.0, fixed, paces.tolist())


def _batch_seconds(
    plan: Plan, placed: Sequence[PlacedStage], costs: StageCosts, samples: Workload
) -> NDArray[np.float64]:
    """Return forward plus backward seconds of the whole batch on each stage, without fixed costs per call: [stages]."""
    sizes = {unit.name: samples.of_samples(unit.name) for unit in plan.units}
    batch = {name: (squares.sum(), tokens.sum(), 0.0) for name, (squares, tokens) in sizes.items()}
    return np.einsum(
        "ij,ij->i", costs.seconds[:, 0] + costs.seconds[:, 1], np.array([batch[one.unit] for one in placed])
    )


def _speeds(plan: Plan, anchor: str, placed: Sequence[PlacedStage], seconds: NDArray[np.float64]) -> list[float]:
    """Return, by anchor replica, global batches per second of its busiest ranks. They are those of the replica itself,
    with other units' stages there, and those of replicas that serve it elsewhere (see `served_by`)."""
    anchors = len(plan.unit(anchor).replicas)
    busy: list[dict[tuple[int, ...], float]] = [{} for _ in range(anchors)]
    replica_of = {one.stage.ranks: one.replica for one in placed if one.unit == anchor}
    for one, own in zip(placed, seconds.tolist(), strict=True):
        ranks = one.stage.ranks
        if ranks in replica_of:
            served: Sequence[int] = [replica_of[ranks]]
        else:
            count = len(plan.unit(one.unit).replicas)
            own *= anchors / count
            served = served_by(one.replica, count, anchors)
        for number in served:
            busy[number][ranks] = busy[number].get(ranks, 0.0) + own
    return [1.0 / max(own.values()) if max(own.values()) > 0 else 1.0 for own in busy]


def split_over_replicas(seconds: NDArray[np.float64], speed: Sequence[float]) -> NDArray[np.int64]:
    """Return every sample's replica, `[samples]`; `seconds [samples, units]`, `speed[replica]` is relative throughput.

    All units are balanced at once, relative to their totals: sorting by encoder seconds and placing by language seconds
    alone leaves the encoder 7 to 43 % uneven.
    """
    from dilatant.schedule.assignment import assign_kernels as kernels

    num_samples = len(seconds)
    total = seconds.sum(axis=0)
    share = np.ascontiguousarray((seconds / np.where(total > 0, total, 1.0)).T)
    order = np.argsort(-share.max(axis=0, initial=0.0), kind="stable")
    replica = np.zeros(num_samples, dtype=np.int64)
    rates = np.asarray(speed, dtype=np.float64)
    kernels.place_units(order, share, rates / rates.sum(), np.zeros(num_samples), np.full(len(rates), np.inf), replica)
    return replica


def served_by(replica: int, replicas: int, anchors: int) -> range:
    """Return the anchor replicas whose samples this replica serves, perhaps together with others."""
    parts = math.gcd(replicas, anchors)
    part, served = replica * parts // replicas, anchors // parts
    return range(part * served, (part + 1) * served)


def intra_reorder(size: NDArray[np.float64], num_groups: int) -> NDArray[np.int64]:
    """Return the group of every sample, `[samples]`, by longest-processing-time-first (Alg. 2, sorted descending).

    `size` is a sample's seconds. Groups are returned by number, since groups of unequal size cannot be recovered from a
    concatenation.
    """
    from dilatant.schedule.assignment import assign_kernels as kernels

    room = np.full(num_groups, float(len(size)))
    group = np.empty(len(size), dtype=np.int64)
    order = np.argsort(-size, kind="stable")
    kernels.place_units(order, size[None], np.ones(num_groups), np.ones(len(size)), room, group)
    return group


def _spread(
    seconds: NDArray[np.float64], present: NDArray[np.bool_], slots: list[list[Microbatch]], replicas: int
) -> tuple[tuple[Microbatch, ...], ...]:
    """Distribute the microbatches of anchor replicas to the replicas of one unit that serve them."""
    result, parts = slots, math.gcd(len(slots), replicas)
    served, serving = len(slots) // parts, replicas // parts
    if replicas != len(slots):
        result = [[] for _ in range(replicas)]
        for part in range(parts):
            for batches in itertools.zip_longest(*slots[part * served : (part + 1) * served], fillvalue=()):
                together = [*itertools.chain.from_iterable(batches)]
                group = intra_reorder(seconds[together], serving).tolist() if serving > 1 else [0] * len(together)
                own: list[list[int]] = [[] for _ in range(serving)]
                for sample, number in zip(together, group, strict=True):
                    own[number].append(sample)
                for number, batch in enumerate(own):
                    result[part * serving + number].append(tuple(batch))
    if present.all():
        return tuple(map(tuple, result))
    there = present.tolist()
    return tuple(tuple(tuple(s for s in batch if there[s]) for batch in batches) for batches in result)
