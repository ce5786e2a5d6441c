"""Replan: derive the next generation's plan; survivors take over the lost ranks' layers with little copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    seconds = layer_seconds or {unit.name: [1.0] * _num_layers(unit) for unit in plan.units}
    change = _Change(plan, anchor, survivors, tuple(joined), fault_tolerance, num_microbatches, seconds)
    try:
        return change.reinstantiated()
    except PlanError:
        return change.colocated()


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """The arguments of `replan`."""

    plan: Plan
    anchor: str
    survivors: Mapping[int, int]
    joined: tuple[int, ...]
    fault_tolerance: int
    num_microbatches: int
    layer_seconds: Mapping[str, Sequence[float]]

    @property
    def size(self) -> int:
        return len(self.survivors) + len(self.joined)

    def reinstantiated(self) -> Plan:
        """Return the plan in which every unit keeps its own ranks. Raises PlanError for other layouts."""
        plan, anchor = self.plan, self.anchor
        hosts = _hosts(plan, anchor)
        owners = [name for name in hosts if hosts[name] is None]
        alive = {name: self._alive(plan.unit(name)) for name in owners}
        if not any(alive[anchor]):
            raise PlanError("all ranks of the unit that hosts others are gone")
        for name in owners:
            if name != anchor and self._lacks_copies(plan.unit(name), alive[name]):
                hosts[name] = anchor
        owners = [name for name in owners if hosts[name] is None]
        used = {rank for name in owners for groups in alive[name] for group in groups for rank in group}
        free = sorted({*self.joined, *(new for new in self.survivors.values() if new not in used)})
        added = self._assign_free_ranks(owners, alive, free)
        units = {name: self._unit(plan.unit(name), alive[name], added[name]) for name in owners}
        for name, host in hosts.items():
            if host is not None:
                units[name] = self._place_on_host(plan.unit(name), units[host])
        new = Plan(tuple(units[unit.name] for unit in plan.units))
        if new.ranks != tuple(range(self.size)):
            raise PlanError(f"ranks {new.ranks} are used of {self.size}")
        return new

    def colocated(self) -> Plan:
        """Return the plan with all units on all ranks: with the required number of replicas if it divides the ranks,
        else one per rank."""
        layers = {unit.name: _num_layers(unit) for unit in self.plan.units}
        feeds = {unit.name: unit.feeds for unit in self.plan.units}
        replicas = self.fault_tolerance + 1
        if self.size % replicas or self.size // replicas > layers[self.anchor]:
            replicas = self.size
        specs = {name: ParallelSpec(replicas=replicas) for name in layers}
        specs[self.anchor] = ParallelSpec(replicas=replicas, pp=self.size // replicas)
        hosts = {name: self.anchor for name in layers if name != self.anchor}
        units = plan_from_specs(layers, specs, feeds, hosts).units
        return Plan(tuple(replace(unit, recompute=self.plan.unit(unit.name).recompute) for unit in units))

    def _is_alive(self, ranks: RankGroup) -> bool:
        return all(rank in self.survivors for rank in ranks)

    def _new(self, ranks: RankGroup) -> RankGroup:
        return tuple(self.survivors[rank] for rank in ranks)

    def _renamed(self, replica: Replica) -> Replica:
        return Replica(tuple(replace(stage, ranks=self._new(stage.ranks)) for stage in replica.stages))

    def _alive(self, unit: UnitPlan) -> list[list[RankGroup]]:
        """Return, for every replica, the groups without lost ranks, as new ranks, in pipeline order."""
        return [
            [self._new(group) for group in _groups(replica) if self._is_alive(group)]
            for replica in unit.replicas
        ]

    def _lacks_copies(self, unit: UnitPlan, alive: list[list[RankGroup]]) -> bool:
        """Return True if the unit's own ranks, with one group per replica, form fewer replicas than before and than
        required: the next failure might hit the last one. On another unit's ranks it has as many replicas as that."""
        left = sum(map(len, alive))
        added = len(self.joined) // _width(unit)
        return not left or left + added < min(len(unit.replicas), self.fault_tolerance + 1)

    def _assign_free_ranks(
        self, owners: Sequence[str], alive: Mapping[str, list[list[RankGroup]]], free: list[int]
    ) -> dict[str, list[RankGroup]]:
        """Assign free ranks in groups, first to units that lost ranks, then to the unit that hosts others. Raises
        PlanError if the ranks do not fill whole groups."""
        added: dict[str, list[RankGroup]] = {name: [] for name in owners}
        wants = []
        for name in owners:
            groups = sum(len(_groups(replica)) for replica in self.plan.unit(name).replicas)
            wants += [name] * (groups - sum(map(len, alive[name])))
        while free:
            name = wants.pop(0) if wants else self.anchor
            width = _width(self.plan.unit(name))
            if len(free) < width:
                raise PlanError(f"{len(free)} ranks are left for groups of {width}")
            added[name].append(tuple(free[:width]))
            del free[:width]
        return added

    def _unit(self, unit: UnitPlan, alive: list[list[RankGroup]], added: list[RankGroup]) -> UnitPlan:
        """Reinstantiate a unit on the groups that are alive and those added."""
        old = [_groups(replica) for replica in unit.replicas]
        if not added and all(len(groups) == len(kept) for groups, kept in zip(old, alive)):
            return replace(unit, replicas=tuple(map(self._renamed, unit.replicas)))
        sample = unit.replicas[0].stages[0]
        if any(stage.degrees != sample.degrees for replica in unit.replicas for stage in replica.stages):
            raise PlanError(f"{unit.name} has stages of unlike widths")
        number = {group: index for index, group in enumerate(group for groups in old for group in groups)}
        running = [[number[group] for group in groups] for groups in old]
        new_ranks = {index: self._new(group) for group, index in number.items() if self._is_alive(group)}
        joined = range(len(number), len(number) + len(added))
        new_ranks |= dict(zip(joined, added))
        count, total = len(new_ranks), self.num_microbatches
        templates = _templates(tuple(self.layer_seconds[unit.name]), max(count, *map(len, old)), total)
        answer = reinstantiate(
            templates,
            running,
            [index for index in number.values() if index not in new_ranks],
            min(self.fault_tolerance + 1, count, total) - 1,
            total,
            joined=joined,
        )
        replicas = []
        for pipeline in answer.pipelines:
            nodes = list(pipeline.nodes)
            if nodes in running:
                replicas.append(self._renamed(unit.replicas[running.index(nodes)]))
                continue
            stages = zip(templates[len(nodes)].stages, nodes)
            replicas.append(
                Replica(
                    tuple(
                        replace(sample, first=first, end=end, ranks=new_ranks[node])
                        for (first, end, _), node in stages
                    )
                )
            )
        return replace(unit, replicas=tuple(replicas))

    def _place_on_host(self, unit: UnitPlan, host: UnitPlan) -> UnitPlan:
        """Place a unit on the ranks of another, replica by replica, stage by stage. New stages divide the ranks as the
        unit did before, or if their number differs, as the host does."""
        count = min(len(host.replicas), max(len(unit.replicas), 1))
        if len(unit.replicas) >= len(self.plan.unit(host.name).replicas):
            count = len(host.replicas)
        intact = {
            frozenset(self._new(ranks)): replica
            for replica in unit.replicas
            if self._is_alive(ranks := _ranks(replica))
        }
        num_layers, own = _num_layers(unit), unit.replicas[0].stages[0].degrees
        most = max(len(_groups(replica)) for replica in unit.replicas)
        replicas = []
        for replica in host.replicas[:count]:
            here = {*_ranks(replica)}
            kept = next((ranks for ranks in intact if ranks <= here), None)
            if kept is not None:
                replicas.append(self._renamed(intact.pop(kept)))
                continue
            stages = list({stage.ranks: stage for stage in replica.stages}.values())[: min(most, num_layers)]
            template = _templates(tuple(self.layer_seconds[unit.name]), len(stages), num_layers)[len(stages)]
            cuts = [*(first for first, _, _ in template.stages), num_layers]
            placed = [stage.ranks for stage in stages]
            degrees = [
                own if own.ranks == len(stage.ranks) else stage.degrees.without_experts for stage in stages
            ]
            replicas.append(Replica(tuple(map(Stage.of, cuts, cuts[1:], placed, degrees))))
        return replace(unit, replicas=tuple(replicas))


def _hosts(plan: Plan, anchor: str) -> dict[str, str | None]:
    """Return unit → the unit on whose ranks it runs, None if it has its own. Raises PlanError for other layouts."""
    ranks = {
        unit.name: {rank for replica in unit.replicas for rank in _ranks(replica)} for unit in plan.units
    }
    hosts: dict[str, str | None] = {}
    for name in sorted(ranks, key=lambda name: (name != anchor, -len(ranks[name]))):
        sharing = [other for other in ranks if other != name and ranks[other] & ranks[name]]
        found = [o for o in sharing if o in hosts and hosts[o] is None and ranks[name] <= ranks[o]]
        if any(ranks[other] & ranks[name] for other in hosts if hosts[other] is None) and not found:
            raise PlanError(f"{name} shares some of its ranks")
        hosts[name] = found[0] if found else None
    return {unit.name: hosts[unit.name] for unit in plan.units}


def _num_layers(unit: UnitPlan) -> int:
    return unit.replicas[0].stages[-1].end


def _width(unit: UnitPlan) -> int:
    """Return the number of ranks of each of a unit's stages."""
    return unit.replicas[0].stages[0].degrees.ranks


def _groups(replica: Replica) -> list[RankGroup]:
    return list(dict.fromkeys(stage.ranks for stage in replica.stages))


def _ranks(replica: Replica) -> RankGroup:
    return tuple(rank for group in _groups(replica) for rank in group)


@lru_cache(maxsize=64)
def _templates(layer_seconds: tuple[float, ...], most: int, num_microbatches: int) -> dict[int, Template]:
    """Plan templates whose nodes are groups of ranks. Cached, so that recovery need not search again."""
    layers = len(layer_seconds)
    return plan_templates(
        {1: layer_seconds}, range(1, min(most, layers) + 1), 1, max(num_microbatches, layers)
    )
