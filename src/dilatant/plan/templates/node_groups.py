"""Groups of nodes of runs that shard weights: after losses, as many train as the nodes that are left can form.

The parts of a weight lie inside one node, and each group of nodes holds the whole model. All groups are equal, so that
a rank's parts and its memory stay the same whichever others are lost, and every part is on one node of each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import Zero
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan, UnitPlan
from dilatant.plan.templates.membership import pipelines_of, ranks_of


def unrecoverable_shards(plan: Plan, shard: Mapping[str, Shard], zero: Zero, devices: int) -> str:
    """Return why a run with these shards could not go on after the loss of a node of `devices` ranks, with keys and
    remedy, or an empty text. shard: unit → what is sharded of it."""
    if not shard:
        return ""
    each, problem = f"{devices} (resilience.ranks_per_node)", ""
    alone = [name for name in shard if not _is_shared(plan.unit(name), devices)]
    if zero == "all":
        problem = "train.zero: all spreads a weight's parts over nodes that are lost one by one; set it to node"
    elif alone:
        problem = (
            f"of the {each} ranks of a node no two hold the same weights of {alone[0]}, or not equally many; lay out "
            "several replicas, or cp, inside each node, or leave train.shard out"
        )
    else:
        try:
            if equal_groups(plan, devices)[1] == 1:
                problem = (
                    f"without a lost node of {each} ranks the others hold no whole replica of {next(iter(shard))}; "
                    "give other nodes replicas of their own, or leave one of these keys out"
                )
        except PlanError as error:
            problem = str(error)
    return problem and f"train.shard and resilience.enabled: {problem}"


def equal_groups(plan: Plan, devices: int) -> tuple[Plan, int]:
    """Return the plan of one group of nodes, on ranks from 0 on, and the number of groups. Ranks are assigned to nodes
    of `devices` ranks in order. Raises PlanError if groups differ."""
    parts = []
    for nodes in _groups(plan, [rank // devices for rank in range(plan.ranks[-1] + 1)]):
        places = enumerate(node * devices + k for node in sorted(nodes) for k in range(devices))
        parts.append(_part(plan, {rank: place for place, rank in places}))
    if any(part != parts[0] for part in parts):
        raise PlanError(
            "nodes differ in what they hold, so that a lost one has no equal; give each node as many replicas of every "
            "unit, or leave train.shard out"
        )
    return parts[0], len(parts)


def regroup(
    pattern: Plan,
    before: Plan,
    node_before: Sequence[int],
    survivors: Mapping[int, int],
    workers: Sequence[int],
    devices: int,
) -> Plan:
    """Return the plan of as many groups like `pattern` as the present nodes of `devices` ranks can form. Groups of
    `before` without a loss stay; others are made of the nodes that are left, where possible in their former places.

    node_before: old rank → old node. survivors: old rank → new rank. workers: number of ranks of each present node.
    Raises PlanError if there is no group.
    """
    first = [sum(workers[:node]) for node in range(len(workers))]
    parts: dict[int, Plan] = {}  # by its first rank
    for nodes in _groups(before, node_before):
        own = [rank for rank in before.ranks if node_before[rank] in nodes]
        if all(rank in survivors for rank in own):
            names = {rank: survivors[rank] for rank in own}
            parts[min(names.values())] = _part(before, names)
    busy = {rank for part in parts.values() for rank in part.ranks}
    loose = [node for node, count in enumerate(workers) if count == devices and first[node] not in busy]
    old_of = {new: old for old, new in survivors.items()}
    held = {node: _held(before, [old_of.get(first[node] + k) for k in range(devices)]) for node in loose}
    size = 1 + pattern.ranks[-1] // devices
    count, chosen = len(loose) // size, list[list[int]]()
    for place in range(size):
        wanted = _held(pattern, range(place * devices, (place + 1) * devices))
        chosen.append([node for node in loose if held[node] == wanted][:count])
        loose = [node for node in loose if node not in chosen[-1]]
    for nodes_of_place in chosen:
        while len(nodes_of_place) < count:
            nodes_of_place.append(loose.pop(0))
    for group in zip(*chosen):
        names = {place * devices + k: first[node] + k for place, node in enumerate(group) for k in range(devices)}
        parts[min(names.values())] = _part(pattern, names)
    if not parts:
        raise PlanError(
            f"with train.shard ranks train in groups of as many nodes of {devices} ranks as in the first plan: {size}"
        )
    together = [parts[rank] for rank in sorted(parts)]
    return Plan(
        tuple(
            replace(unit, replicas=tuple(replica for part in together for replica in part.unit(unit.name).replicas))
            for unit in pattern.units
        )
    )


def _is_shared(unit: UnitPlan, devices: int) -> bool:
    """Return True if on each of its nodes several ranks, equally many, hold every weight of a unit."""
    for stages in zip(*(replica.stages for replica in unit.replicas)):
        parts = max(stages[0].tp, stages[0].ep)
        for part in range(parts):
            holders = Counter(rank // devices for stage in stages for rank in stage.ranks[part::parts])
            if min(holders.values()) < 2 or len({*holders.values()}) > 1:
                return False
    return True


def _groups(plan: Plan, node_of: Sequence[int]) -> list[set[int]]:
    """Return the nodes of each group: nodes that pipelines have in common are in one."""
    groups: list[set[int]] = []
    for ranks in map(ranks_of, pipelines_of(plan)):
        nodes = {node_of[rank] for rank in ranks}
        nodes = nodes.union(*(group for group in groups if group & nodes))
        groups = [*(group for group in groups if not group & nodes), nodes]
    return sorted(groups, key=min)


def _part(plan: Plan, names: Mapping[int, int]) -> Plan:
    """Return the replicas whose ranks are among `names`, renamed."""
    own = [
        tuple(r.renamed(names) for r in unit.replicas if all(rank in names for s in r.stages for rank in s.ranks))
        for unit in plan.units
    ]
    return Plan(tuple(replace(unit, replicas=replicas) for unit, replicas in zip(plan.units, own)))


def _held(plan: Plan, ranks: Iterable[int | None]) -> list[list[tuple[str, int, int]]]:
    """Return the stages that each of these ranks holds: unit, first layer and end; None: a rank that held none."""
    placed = [() if rank is None else plan.stages_of_rank.get(rank, ()) for rank in ranks]
    return [[(one.unit, one.stage.first, one.stage.end) for one in own] for own in placed]
