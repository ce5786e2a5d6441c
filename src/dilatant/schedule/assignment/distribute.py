"""The Assignment of a step: samples over the replicas of every unit, and over the microbatches of each replica.

The replicas of the *anchor*, the unit that the encoders feed (the language model), each take a part of the samples and
group them by one of the microbatch policies. Every other unit follows: a replica serves a fixed range of anchor
replicas, and its k-th microbatch holds the samples of their k-th microbatches. So units may have any numbers of
replicas: with fewer encoder replicas than language-model replicas, the encoder's microbatches are that much larger
(DistTrain 5.1); with more, several encoder replicas share one language-model replica's microbatch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.errors import UserError
from dilatant.plan.costs.bin_packing import pack_rows
from dilatant.plan.plan import Plan
from dilatant.schedule.assignment.assign import Microbatches, Policy, assign_microbatches
from dilatant.schedule.assignment.disttrain import intra_reorder
from dilatant.schedule.assignment.pipeline_shape import PipelineShape, ScheduleFamily
from dilatant.schedule.schedule import Assignment, Microbatch


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
    kernels.place_units(
        order, share, rates / rates.sum(), np.zeros(num_samples), np.full(len(rates), np.inf), replica
    )
    return replica


def served_by(replica: int, replicas: int, anchors: int) -> range:
    """Return the anchor replicas whose samples this replica serves: several, or one that it shares with others."""
    if replicas <= anchors:
        return range(-(-replica * anchors // replicas), -(-(replica + 1) * anchors // replicas))
    return range(replica * anchors // replicas, replica * anchors // replicas + 1)


def assign(
    plan: Plan,
    seconds: Mapping[str, ArrayLike],
    num_microbatches: int | Sequence[int],
    policy: Policy = "balanced",
    seed: int = 0,
    *,
    anchor: str | None = None,
    speed: Sequence[float] | None = None,
    backward: Mapping[str, float] | None = None,
    fixed: Mapping[str, float] | None = None,
    family: ScheduleFamily | None = None,
    evaluations: int | None = None,
    weight: ArrayLike | None = None,
    capacity: float | None = None,
    pace: Mapping[str, Sequence[float]] | None = None,
) -> Assignment:
    """Assign samples to the microbatches of every replica of every unit.

    `seconds[unit][sample]` is the time of a sample on a typical stage of the unit, forward plus backward, 0 where
    it has no work there: such a sample is absent from that unit's microbatches (without work anywhere, it stays in the
    anchor's). `num_microbatches` is the count of every anchor replica, or one count each. `speed` is the anchor
    replicas' relative throughput, by default in proportion to these counts (`compose_pipelines` gives a slow pipeline
    fewer). `anchor` defaults to the unit that most others feed. `backward[unit]` is backward seconds per forward second
    (default 2), `fixed[unit]` the seconds per microbatch and stage in addition to those of its samples (default 0).
    `family` is the schedule that will run, which policies that simulate use; eager 1F1B by default.
    `pace[unit][replica]` is the seconds of a stage there relative to the unit's first replica; by default from its
    number of layers alone. With a token budget, the `weight[sample]` of an anchor's microbatch add up to at most
    `capacity`; a larger sample is alone in its microbatch. A replica then gets as many microbatches as the budget
    requires, and at least its count. Raises UserError if a unit is missing or lists differ in length.
    """
    names = [unit.name for unit in plan.units]
    missing = [name for name in names if name not in seconds]
    if missing:
        raise UserError(f"seconds says nothing about units {missing}")
    table = np.stack([np.asarray(seconds[name], dtype=np.float64) for name in names], axis=1)
    center = (
        names.index(anchor) if anchor is not None else _pipeline(plan, 0, None, {}, {}, None, {})[0].anchor
    )
    replicas = len(plan.units[center].replicas)
    counts = [num_microbatches] * replicas if isinstance(num_microbatches, int) else list(num_microbatches)
    rates = list(speed) if speed is not None else [float(count) for count in counts]
    if len(counts) != replicas or len(rates) != replicas:
        raise UserError(
            f"{names[center]} has {replicas} replicas, but there are {len(counts)} microbatch counts and "
            f"{len(rates)} speeds"
        )
    replica_of = split_over_replicas(table, rates)

    def group(replica: int) -> tuple[NDArray[np.int64], Microbatches]:
        mine, count = np.flatnonzero(replica_of == replica), counts[replica]
        weights = None
        if weight is not None and capacity is not None:
            # Clipped: a sample above the budget fills a microbatch, and nothing joins it.
            weights = np.minimum(np.asarray(weight, dtype=np.float64)[mine], capacity)
            count = max(count, len(pack_rows(weights.tolist(), capacity)))
        shape, scale = _pipeline(plan, replica, center, backward or {}, fixed or {}, family, pace or {})
        return mine, assign_microbatches(
            table[mine] * scale,
            count,
            policy,
            seed + replica,
            shape=shape,
            evaluations=evaluations,
            weight=weights,
            capacity=np.inf if capacity is None else capacity,
        )

    if policy == "searched" and replicas > 1:
        # The search runs in compiled code that releases the GIL; replicas are independent of each other.
        with ThreadPoolExecutor(min(replicas, os.cpu_count() or 1), "assign") as pool:
            grouped = list(pool.map(group, range(replicas)))
    else:
        grouped = [group(replica) for replica in range(replicas)]
    slots: list[list[list[Microbatch]]] = [
        [[tuple(mine[list(batch)].tolist()) for batch in found.microbatches[unit]] for mine, found in grouped]
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


def _pipeline(
    plan: Plan,
    replica: int,
    center: int | None,
    backward: Mapping[str, float],
    fixed: Mapping[str, float],
    family: ScheduleFamily | None,
    pace: Mapping[str, Sequence[float]],
) -> tuple[PipelineShape, NDArray[np.float64]]:
    """Return the pipeline of one anchor replica (its stages and those of the replicas that serve it) and, by unit, the
    seconds of a stage there relative to a stage of the unit's first replica.

    A replica that serves several anchor replicas merges their microbatches, so its seconds are multiplied by their
    number.
    """
    number = {unit.name: index for index, unit in enumerate(plan.units)}
    anchors = 1 if center is None else len(plan.units[center].replicas)
    stages, ranks, scale, constants = [], [], [], []
    for unit in plan.units:
        count = len(unit.replicas)
        serving = replica * count // anchors if count <= anchors else -(-replica * count // anchors)
        here = unit.replicas[serving].stages
        longer = pace[unit.name][serving] if unit.name in pace else len(unit.replicas[0].stages) / len(here)
        stages.append(len(here))
        ranks += [stage.ranks[0] for stage in here]
        scale.append(longer * anchors / count)
        constants.append(fixed.get(unit.name, 0.0) * longer)
    return PipelineShape(
        stages=tuple(stages),
        feeds=tuple(tuple(number[target] for target in unit.feeds) for unit in plan.units),
        backward=tuple(backward.get(unit.name, 2.0) for unit in plan.units),
        fixed_seconds=tuple(constants),
        family=family,
        ranks=tuple(ranks),
    ), np.asarray(scale)


def _spread(
    seconds: NDArray[np.float64], present: NDArray[np.bool_], slots: list[list[Microbatch]], replicas: int
) -> tuple[tuple[Microbatch, ...], ...]:
    """Distribute the microbatches of anchor replicas to the replicas of one unit that serve them."""
    anchors = len(slots)
    result: list[list[Microbatch]] = [[] for _ in range(replicas)]
    if replicas == anchors:
        result = slots
    elif replicas < anchors:
        for replica in range(replicas):
            served = (slots[a] for a in served_by(replica, replicas, anchors))
            together = itertools.zip_longest(*served, fillvalue=())
            result[replica] = [tuple(itertools.chain.from_iterable(batches)) for batches in together]
    else:
        for a in range(anchors):
            serving = range(-(-a * replicas // anchors), -(-(a + 1) * replicas // anchors))
            for batch in slots[a]:
                group = intra_reorder(seconds[list(batch)], len(serving))
                parts: list[list[int]] = [[] for _ in serving]
                for sample, part in zip(batch, group.tolist(), strict=True):
                    parts[part].append(sample)
                for replica, own in zip(serving, parts, strict=True):
                    result[replica].append(tuple(own))
    if present.all():
        return tuple(map(tuple, result))
    there = present.tolist()
    return tuple(tuple(tuple(s for s in batch if there[s]) for batch in batches) for batches in result)
