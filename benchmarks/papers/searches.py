"""The searches of published systems, as enumerations of the only candidates that a search then simulates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from benchmarks.papers.disttrain.search import disaggregated
from dilatant.plan.costs.partition import partition_layers, partition_layers_in_memory
from dilatant.plan.costs.stable_batch import feasible_allocations
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.layouts.option import Option, ParallelChains, PlanCandidate
from dilatant.plan.layouts.option_table import ChainRequest, OptionTable
from dilatant.plan.layouts.space import SearchProblem, Space
from dilatant.plan.model_spec import EncoderPosition, ModelSpec
from dilatant.plan.search.closed_form import bound, chain_times
from dilatant.plan.search.enumeration import enumerate_candidates
from dilatant.plan.search.search import Enumerate


class Mode(StrEnum):
    """A published system. cornstarch: encoders parallel or colocated, freezing-aware cuts (Cornstarch v3 4.1). entrain:
    encoders colocated, devices in proportion to the data's mean work, then the best degrees (Entrain, the thesis,
    4.4.3). disttrain: DistTrain's optimum. megatron: encoders in one stage before the language model, with its degrees;
    cuts as if everything trained."""

    CORNSTARCH = "cornstarch"
    ENTRAIN = "entrain"
    DISTTRAIN = "disttrain"
    MEGATRON = "megatron"


def candidates_of(mode: Mode, problem: SearchProblem) -> Enumerate:
    """Return the function that enumerates what the system would consider, its most promising candidate first."""
    if mode is Mode.CORNSTARCH:
        return _cornstarch
    if mode is Mode.ENTRAIN:
        return _entrain
    if mode is Mode.DISTTRAIN:
        return lambda space: sorted(disaggregated(space), key=_order)
    return lambda space: sorted(_megatron(problem, space), key=_order)


def _order(one: PlanCandidate) -> tuple[float, int]:
    return one.estimate, -one.gpus


def _cornstarch(space: Space) -> list[PlanCandidate]:
    return [
        one
        for one in enumerate_candidates(space)
        if one.encoders_at is not EncoderPosition.IN_LANGUAGE and len(set(one.counts)) == 1 and one.row_tokens is None
    ]


def _entrain(space: Space) -> list[PlanCandidate]:
    """The candidates on the division of devices nearest to the units' mean work, for every number of pipelines."""
    roles = space.roles
    position = EncoderPosition.COLOCATED if len(roles.encoders) > 1 else EncoderPosition.PARALLEL
    by_shape: dict[tuple[int, int], list[PlanCandidate]] = defaultdict(list)
    for one in _cornstarch(space):
        if one.encoders_at is position:
            by_shape[one.replicas, one.num_microbatches].append(one)
    parts = [part for part in (roles.encoders, (roles.language,), roles.generators) if part]
    work = np.array([sum(_device_seconds(space, unit) for unit in part) for part in parts])
    found = []
    for (replicas, _), members in by_shape.items():
        budget = space.cluster.num_devices // replicas
        devices = [[_devices(one, part) for part in parts] for one in members]
        allocations = np.array(feasible_allocations([sorted(set(own)) for own in zip(*devices)], budget))
        if not len(allocations):
            continue
        distance = ((allocations / budget - work / work.sum()) ** 2).sum(axis=1)
        chosen = allocations[int(distance.argmin())].tolist()
        # The encoders may leave some of their devices idle.
        first = 1 if roles.encoders else 0
        found += [one for one, own in zip(members, devices) if own[first:] == chosen[first:] and own[0] <= chosen[0]]
    return sorted(found, key=_order)


def _devices(one: PlanCandidate, units: Sequence[str]) -> int:
    """Devices of these units in one pipeline."""
    return sum(option.gpus for option in one.options if set(option.chain.cuts) & set(units))


def _device_seconds(space: Space, unit: str) -> float:
    """Device seconds of the mean sample in a unit, at the smallest degrees with costs."""
    degrees = space.table.units.degrees([unit])
    least = min(degrees, key=lambda one: (one.ranks, one))
    return float(space.table.units.layers(unit, least, 1).seconds.sum()) * least.ranks


def _megatron(problem: SearchProblem, space: Space) -> list[PlanCandidate]:
    """One stage for all encoders, one for all generators, and the language model's degrees everywhere. Cuts and
    estimates assume that every layer trains."""
    all_train = ModelSpec(
        tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True) for layer in unit.layers))
            for unit in problem.model.units
        )
    )
    limits = space.cluster.gpus_per_node, problem.rules, problem.global_batch
    costs = problem.costs.on(space.cluster.name)
    unaware = OptionTable(UnitLayers(all_train, costs, problem.workload, *limits), math.inf)
    roles = space.roles
    ends = [units for units in (roles.encoders, roles.generators) if units]
    found = []
    for replicas in range(1, space.cluster.num_devices + 1):
        budget = space.cluster.num_devices // replicas
        table = space.table.shared_by(replicas, budget)
        for count, row_tokens in space.microbatch_counts(replicas).items():
            if row_tokens is not None:
                continue
            samples = space.global_batch / (replicas * count)
            for degrees in table.units.degrees(roles.units):
                stages = budget // degrees.ranks - len(ends)
                if not 1 <= stages <= space.model.unit(roles.language).most_stages:
                    continue
                balance = unaware.units.layers(roles.language, degrees, samples).seconds
                after = len(ends) - bool(roles.encoders)
                request = ChainRequest(roles.language, degrees, stages, samples, count)
                language = _cut_by(balance, table, request, after)
                shape = degrees, 1, samples, count
                sides = [option for units in ends if (option := table.colocated(units, *shape))]
                as_trained = [option for units in ends if (option := unaware.colocated(units, *shape))]
                if language is None or len(sides) < len(ends):
                    continue
                by_stage = np.add.reduceat(balance, language.chain.cuts[roles.language])
                slowest = max([float(by_stage.max()), *(option.slowest for option in as_trained)])
                total = float(balance.sum()) + sum(option.total for option in as_trained)
                before = ParallelChains().beside(sides[0]) if roles.encoders else ParallelChains()
                behind = sides[-1:] if roles.generators else []
                options = (*before.options, language, *behind)
                times = [chain_times(space, replicas, count, option) for option in options]
                found.append(
                    PlanCandidate(
                        encoders_at=EncoderPosition.COLOCATED,
                        replicas=replicas,
                        microbatch_size=max(1, round(samples)),
                        num_microbatches=count,
                        options=options,
                        counts=(replicas,) * len(options),
                        estimate=total + (count - 1) * slowest,
                        bound=bound(before, language, options, times),
                    )
                )
    return found


def _cut_by(balance: np.ndarray, table: OptionTable, request: ChainRequest, behind: int) -> Option | None:
    """The language model cut by other seconds than its own: within memory if it must be, and with as much
    recomputation as that takes."""
    for level in table.units.levels([request.unit]):
        request = request._replace(level=level)
        option = table.cut(request, partition_layers(balance, request.stages))
        if option.headroom >= behind:
            return option
        cuts = partition_layers_in_memory(balance, *table.memory(table.layers(request), request, behind))
        if cuts is not None:
            return table.cut(request, cuts)
    return None
