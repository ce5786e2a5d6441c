"""Plan validation: list every reason why a plan cannot train a model on a cluster, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dilatant.config.errors import UserError, list_problems
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec, UnitSpec
from dilatant.plan.plan import PlacedStage, Plan


class InvalidPlanError(UserError):
    """The plan cannot train; the message lists every reason."""


def validate(plan: Plan, model: ModelSpec, cluster: Cluster) -> None:
    """Raise InvalidPlanError, listing all problems, unless the plan is valid.

    Every replica must hold every layer of its unit exactly once, in order. A rank belongs to one group of ranks, which
    may hold stages of several units, each with its own degrees, or several stages of one replica, which differ at most
    in ep, but not two replicas of one unit. Ranks exist in the cluster; the tensor-parallel ranks of a stage share a
    node.
    """
    problems = plan_problems(plan, model, cluster)
    if problems:
        raise InvalidPlanError(str(list_problems("this plan cannot train:", problems)))


def plan_problems(plan: Plan, model: ModelSpec, cluster: Cluster) -> list[str]:
    """Return every problem that `validate` reports."""
    return [*_unit_problems(plan, model), *_layer_problems(plan, model), *_rank_problems(plan, cluster)]


def _place(entry: PlacedStage) -> str:
    return f"{entry.unit} replica {entry.replica} stage {entry.position}"


def _unit_problems(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Report units that are missing, unknown or duplicated; edges that differ from the model's or point backwards."""
    planned = [unit.name for unit in plan.units]
    known = [unit.name for unit in model.units]
    yield from (f"unit {name!r} is in the plan twice" for name in sorted({n for n in planned if planned.count(n) > 1}))
    yield from (f"unit {name!r} of the model is not in the plan" for name in known if name not in planned)
    yield from (
        f"unit {name!r} of the plan is not in the model, which has {known}"
        for name in dict.fromkeys(planned)
        if name not in known
    )
    for index, unit in enumerate(plan.units):
        if not unit.replicas:
            yield f"unit {unit.name!r} has no replica"
        if unit.name in known and sorted(unit.feeds) != sorted(model.unit(unit.name).feeds):
            feeds = list(model.unit(unit.name).feeds)
            yield f"unit {unit.name!r} feeds {list(unit.feeds)} in the plan, {feeds} in the model"
        for target in unit.feeds:
            if target in planned[: index + 1]:
                yield f"unit {unit.name!r} feeds {target!r}, which must come after it in the plan"


def _layer_problems(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Report layers that a replica holds twice or not at all, and stages that are empty or exceed the unit's layers."""
    units = {unit.name: unit for unit in model.units}
    for planned in plan.units:
        unit = units.get(planned.name)
        if unit is None:
            continue
        if planned.recompute and len(planned.recompute) != len(unit.layers):
            yield (
                f"unit {planned.name!r} says of {len(planned.recompute)} layers what is recomputed, but has "
                f"{len(unit.layers)}"
            )
        for number, replica in enumerate(planned.replicas):
            where = f"{planned.name} replica {number}"
            held = np.zeros(len(unit.layers), dtype=np.int64)
            for position, stage in enumerate(replica.stages):
                if stage.first >= stage.end:
                    yield f"{where} stage {position} holds no layer ({stage.first} to {stage.end})"
                if stage.first < 0 or stage.end > len(unit.layers):
                    yield (
                        f"{where} stage {position} holds layers {stage.first} to {stage.end}, but {planned.name} has "
                        f"layers 0 to {len(unit.layers)}"
                    )
                held[max(stage.first, 0) : max(stage.end, 0)] += 1
            if (held > 1).any():
                yield f"{where} holds {_names(unit, held > 1)} twice"
            if (held == 0).any():
                yield f"{where} lacks {_names(unit, held == 0)}"
            firsts = [stage.first for stage in replica.stages]
            if firsts != sorted(firsts):
                yield f"the stages of {where} are not in layer order: they begin at {firsts}"


def _names(unit: UnitSpec, chosen: np.ndarray) -> str:
    """Return the names of the chosen layers, with runs shortened."""
    numbers = np.flatnonzero(chosen).tolist()
    runs = [run for run in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(run)]
    names = [
        unit.layers[int(run[0])].name + (f" to {unit.layers[int(run[-1])].name}" if len(run) > 1 else "")
        for run in runs
    ]
    return ("layer " if len(numbers) == 1 else "layers ") + ", ".join(names)


def _rank_problems(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Report groups of the wrong size, ranks in two groups or outside the cluster, tensor parallelism across nodes."""
    groups: dict[int, PlacedStage] = {}
    holders: dict[tuple[str, tuple[int, ...]], PlacedStage] = {}
    for entry in plan.stages():
        stage = entry.stage
        yield from (f"{_place(entry)} {problem}" for problem in stage.degrees.problems(stage.ranks))
        if len(set(stage.ranks)) < len(stage.ranks):
            yield f"{_place(entry)} names a rank twice: {list(stage.ranks)}"
        for rank in dict.fromkeys(stage.ranks):
            other = groups.setdefault(rank, entry)
            there, here = (one.stage.degrees.without_experts for one in (other, entry))
            if other.stage.ranks != stage.ranks or (other.unit == entry.unit and there != here):
                yield (
                    f"rank {rank} is in two groups: {_place(other)} on {list(other.stage.ranks)} ({there}) and "
                    f"{_place(entry)} on {list(stage.ranks)} ({here})"
                )
        other = holders.setdefault((entry.unit, stage.ranks), entry)
        if other.replica != entry.replica:
            yield f"ranks {list(stage.ranks)} hold two replicas of one unit: {_place(other)}, {_place(entry)}"
        beyond = [rank for rank in stage.ranks if not 0 <= rank < cluster.num_devices]
        if beyond:
            yield (
                f"{_place(entry)} uses ranks {beyond}, but the cluster has {cluster.num_devices} devices "
                f"({cluster.nodes} nodes of {cluster.gpus_per_node})"
            )
        kinds = list(dict.fromkeys(cluster.at(rank).name for rank in stage.ranks))
        if len(kinds) > 1 and not beyond:
            yield f"{_place(entry)} has ranks of unlike groups of devices: {', '.join(kinds)}"
        for start in range(0, len(stage.ranks), max(stage.tp, 1)):
            group = stage.ranks[start : start + stage.tp]
            nodes = sorted({cluster.node_of(rank) for rank in group})
            if stage.tp > 1 and len(nodes) > 1:
                yield (
                    f"{_place(entry)} puts tensor-parallel ranks {list(group)} on nodes {nodes}; they must share one"
                )
    if len(plan.ranks) > cluster.num_devices:
        yield f"the plan needs {len(plan.ranks)} devices, the cluster has {cluster.num_devices}"
