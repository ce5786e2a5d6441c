"""Replan: derive the next generation's plan; survivors take over the lost ranks' layers with little copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from dilatant.plan.errors import PlanError
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan, Replica, Stage, UnitPlan
from dilatant.plan.templates.reinstantiate import reinstantiate
from dilatant.plan.templates.templates import Template, plan_templates

RankGroup = tuple[int, ...]
"""The ranks of a stage."""


def replan(
    plan: Plan,
    anchor: str,
    survivors: Mapping[int, int],
    joined: Sequence[int],
    fault_tolerance: int,
    num_microbatches: int,
    layer_seconds: Mapping[str, Sequence[float]] | None = None,
) -> Plan:
    """Return the plan for the ranks that are present now.

    anchor: the unit whose ranks also run units that have lost too many of their own ranks. survivors: old rank → new
    rank; joined: new ranks without state. Every new rank is used, with as many replicas as `fault_tolerance` requires
    and ranks allow. num_microbatches: of a step, over all replicas.
    layer_seconds: unit → forward plus backward of each layer for a microbatch; by default equal for all layers.

    Each unit with its own ranks is reinstantiated separately (Oobleck thesis, 2.5.1). Units on another unit's ranks are
    placed like that unit, and so is a unit whose own ranks form too few replicas. A replica that lost no rank is
    unchanged. If units share ranks in any other layout, or nothing fits, all units are placed on all ranks.
    """
    seconds = layer_seconds or {unit.name: [1.0] * unit.replicas[0].stages[-1].end for unit in plan.units}
    try:
        return _reinstantiated(
            plan, anchor, survivors, list(joined), fault_tolerance, num_microbatches, seconds
        )
    except PlanError:
        return _colocate_all(plan, anchor, len(survivors) + len(joined), fault_tolerance)


def _reinstantiated(
    plan: Plan,
    anchor: str,
    survivors: Mapping[int, int],
    joined: list[int],
    fault_tolerance: int,
    num_microbatches: int,
    layer_seconds: Mapping[str, Sequence[float]],
) -> Plan:
    hosts = _hosts(plan, anchor)
    owners = [name for name in hosts if hosts[name] is None]
    alive = {name: _alive(plan.unit(name), survivors) for name in owners}
    if not any(alive[anchor]):
        raise PlanError("all ranks of the unit that hosts others are gone")
    homeless = [
        name
        for name in owners
        if name != anchor and _lacks_copies(plan.unit(name), alive[name], len(joined), fault_tolerance)
    ]
    for name in homeless:
        hosts[name] = anchor
    owners = [name for name in owners if name not in homeless]
    used = {rank for name in owners for groups in alive[name] for group in groups for rank in group}
    free = sorted({*joined, *(new for new in survivors.values() if new not in used)})
    given = _assign_free_ranks(plan, owners, alive, free, anchor)
    made: dict[str, UnitPlan] = {}
    for name in owners:
        made[name] = _unit(
            plan.unit(name),
            alive[name],
            given[name],
            survivors,
            fault_tolerance,
            num_microbatches,
            layer_seconds[name],
        )
    for name, host in hosts.items():
        if host is not None:
            made[name] = _place_on_host(plan, name, made[host], host, survivors, layer_seconds[name])
    new = Plan(tuple(made[unit.name] for unit in plan.units))
    if new.ranks != tuple(range(len(survivors) + len(joined))):
        raise PlanError(f"ranks {new.ranks} are used of {len(survivors) + len(joined)}")
    return new


def _hosts(plan: Plan, anchor: str) -> dict[str, str | None]:
    """Return unit → the unit on whose ranks it runs, None if it has its own. Raises PlanError for other layouts."""
    ranks = {
        unit.name: {rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks}
        for unit in plan.units
    }
    hosts: dict[str, str | None] = {}
    for name in sorted(ranks, key=lambda name: (name != anchor, -len(ranks[name]))):
        sharing = [other for other in ranks if other != name and ranks[other] & ranks[name]]
        found = [o for o in sharing if o in hosts and hosts[o] is None and ranks[name] <= ranks[o]]
        if any(ranks[other] & ranks[name] for other in hosts if hosts[other] is None) and not found:
            raise PlanError(f"{name} shares some of its ranks")
        hosts[name] = found[0] if found else None
    return {unit.name: hosts[unit.name] for unit in plan.units}


def _alive(unit: UnitPlan, survivors: Mapping[int, int]) -> list[list[RankGroup]]:
    """Return, for every replica, the groups without lost ranks, as new ranks, in pipeline order."""
    return [
        [
            tuple(survivors[rank] for rank in group)
            for group in _groups(replica)
            if all(rank in survivors for rank in group)
        ]
        for replica in unit.replicas
    ]


def _lacks_copies(unit: UnitPlan, alive: list[list[RankGroup]], joined: int, fault_tolerance: int) -> bool:
    """Return True if the unit's own ranks, with one group per replica, form fewer replicas than before and than
    required: the next failure might hit the last one. On another unit's ranks it has as many replicas as that unit."""
    left = sum(map(len, alive))
    stage = unit.replicas[0].stages[0]
    return not left or left + joined // (stage.tp * stage.cp) < min(len(unit.replicas), fault_tolerance + 1)


def _groups(replica: Replica) -> list[RankGroup]:
    return list(dict.fromkeys(stage.ranks for stage in replica.stages))


def _assign_free_ranks(
    plan: Plan,
    owners: Sequence[str],
    alive: Mapping[str, list[list[RankGroup]]],
    free: list[int],
    anchor: str,
) -> dict[str, list[RankGroup]]:
    """Assign free ranks in groups, first to units that lost ranks, then to the unit that hosts others. Raises PlanError
    if the ranks do not fill whole groups."""
    given: dict[str, list[RankGroup]] = {name: [] for name in owners}
    wants = []
    for name in owners:
        unit = plan.unit(name)
        lost = sum(len(_groups(replica)) for replica in unit.replicas) - sum(map(len, alive[name]))
        wants += [name] * lost
    while free:
        name = wants.pop(0) if wants else anchor
        stage = plan.unit(name).replicas[0].stages[0]
        width = stage.tp * stage.cp
        if len(free) < width:
            raise PlanError(f"{len(free)} ranks are left for groups of {width}")
        given[name].append(tuple(free[:width]))
        del free[:width]
    return given


def _unit(
    unit: UnitPlan,
    alive: list[list[RankGroup]],
    given: list[RankGroup],
    survivors: Mapping[int, int],
    fault_tolerance: int,
    num_microbatches: int,
    layer_seconds: Sequence[float],
) -> UnitPlan:
    old = [_groups(replica) for replica in unit.replicas]
    if not given and all(len(groups) == len(kept) for groups, kept in zip(old, alive)):
        return replace(unit, replicas=tuple(_renamed(replica, survivors) for replica in unit.replicas))
    sample = unit.replicas[0].stages[0]
    if any((s.tp, s.cp, s.ep) != (sample.tp, sample.cp, sample.ep) for r in unit.replicas for s in r.stages):
        raise PlanError(f"{unit.name} has stages of unlike widths")
    number = {group: index for index, group in enumerate(group for groups in old for group in groups)}
    running = [[number[group] for group in groups] for groups in old]
    new_ranks = {
        index: tuple(survivors[rank] for rank in group)
        for group, index in number.items()
        if all(rank in survivors for rank in group)
    }
    joined = range(len(number), len(number) + len(given))
    new_ranks |= dict(zip(joined, given))
    count = len(new_ranks)
    templates = _templates(tuple(layer_seconds), max(count, *map(len, old)), num_microbatches)
    replicas = min(fault_tolerance + 1, count, num_microbatches)
    answer = reinstantiate(
        templates,
        running,
        [index for index in number.values() if index not in new_ranks],
        replicas - 1,
        num_microbatches,
        joined=joined,
    )
    made = []
    for pipeline in answer.pipelines:
        nodes = list(pipeline.nodes)
        if nodes in running:
            made.append(_renamed(unit.replicas[running.index(nodes)], survivors))
            continue
        stages = templates[len(nodes)].stages
        made.append(
            Replica(
                tuple(
                    replace(sample, first=first, end=end, ranks=new_ranks[node])
                    for (first, end, _), node in zip(stages, nodes)
                )
            )
        )
    return replace(unit, replicas=tuple(made))


@lru_cache(maxsize=64)
def _templates(layer_seconds: tuple[float, ...], most: int, num_microbatches: int) -> dict[int, Template]:
    """Plan templates whose nodes are groups of ranks. Cached, so that recovery need not search again."""
    layers = len(layer_seconds)
    return plan_templates(
        {1: layer_seconds}, range(1, min(most, layers) + 1), 1, max(num_microbatches, layers)
    )


def _place_on_host(
    plan: Plan,
    name: str,
    host: UnitPlan,
    host_name: str,
    survivors: Mapping[int, int],
    layer_seconds: Sequence[float],
) -> UnitPlan:
    """Place a unit on the ranks of another, replica by replica, stage by stage."""
    unit = plan.unit(name)
    count = min(len(host.replicas), max(len(unit.replicas), 1))
    if len(unit.replicas) >= len(plan.unit(host_name).replicas):
        count = len(host.replicas)
    intact = {
        frozenset(survivors[rank] for stage in replica.stages for rank in stage.ranks): replica
        for replica in unit.replicas
        if all(rank in survivors for stage in replica.stages for rank in stage.ranks)
    }
    num_layers = unit.replicas[0].stages[-1].end
    most = max(len(_groups(replica)) for replica in unit.replicas)
    replicas = []
    for replica in host.replicas[:count]:
        here = {rank for stage in replica.stages for rank in stage.ranks}
        kept = next((ranks for ranks in intact if ranks <= here), None)
        if kept is not None:
            replicas.append(_renamed(intact.pop(kept), survivors))
            continue
        stages = list({stage.ranks: stage for stage in replica.stages}.values())[: min(most, num_layers)]
        template = _templates(tuple(layer_seconds), len(stages), num_layers)[len(stages)]
        cuts = [*(first for first, _, _ in template.stages), num_layers]
        replicas.append(
            Replica(
                tuple(
                    Stage(first, end, stage.ranks, stage.tp, stage.cp)
                    for stage, first, end in zip(stages, cuts, cuts[1:])
                )
            )
        )
    return replace(unit, replicas=tuple(replicas))


def _renamed(replica: Replica, survivors: Mapping[int, int]) -> Replica:
    return Replica(
        tuple(
            replace(stage, ranks=tuple(survivors[rank] for rank in stage.ranks)) for stage in replica.stages
        )
    )


def _colocate_all(plan: Plan, anchor: str, size: int, fault_tolerance: int) -> Plan:
    """Place all units on all ranks: with the required number of replicas if it divides the ranks, else one per rank."""
    layers = {unit.name: unit.replicas[0].stages[-1].end for unit in plan.units}
    feeds = {unit.name: unit.feeds for unit in plan.units}
    replicas = fault_tolerance + 1
    if size % replicas or size // replicas > layers[anchor]:
        replicas = size
    specs = {name: ParallelSpec(replicas=replicas) for name in layers}
    specs[anchor] = ParallelSpec(replicas=replicas, pp=size // replicas)
    made = plan_from_specs(layers, specs, feeds, {name: anchor for name in layers if name != anchor})
    return Plan(tuple(replace(unit, recompute=plan.unit(unit.name).recompute) for unit in made.units))
