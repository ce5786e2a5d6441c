"""Membership planning: one planner makes the plans of the present nodes for first plans, replays and recovery."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.templates.copies import copies_on_unlike_nodes, disjoint
from dilatant.plan.templates.reinstantiate import LayerSpan, PipelineChooser, RunningPipeline, best_choice, node_layers
from dilatant.plan.templates.templates import LayerMemory, Template, plan_templates

Pipeline = Mapping[str, tuple[Replica, ...]]
"""Unit → its replicas in one pipeline: exactly one replica if the pipeline is an instance of a template."""

_TemplateStage = tuple[int, int, slice, Degrees]
"""First layer of a unit, end layer, places among the pipeline's ranks, and degrees of a stage."""

LESS_MEMORY = 0.95
"""Share of the bytes of a rank that ran out of memory that later plans may use: a run ends after a few such plans."""


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Costs of pipelines that run all units as one chain of layers, on nodes of `devices` devices.

    layers: unit → its number of layers, in the order of the chain. feeds, recompute: as in `UnitPlan`. degrees: unit →
    devices of a stage → degrees of the stage. seconds: devices of a stage → forward plus backward of each layer of the
    chain for one microbatch; a step has `num_microbatches` over all pipelines. layer_bytes: bytes of state of each
    layer that a new holder receives, at `bytes_per_second` per node. keeps_layout: the run's first plan was not made
    from these costs, and its layout is kept where possible. narrowest: unit → devices of its narrowest stage in that
    layout; narrower stages are made only where nothing else fits, even if they would be faster. domains: NVLink
    domain of each node of the plan that has these costs, in the order of ranks; empty if no domain joins nodes.
    """

    layers: dict[str, int]
    feeds: dict[str, tuple[str, ...]]
    recompute: dict[str, tuple[Recompute, ...]]
    degrees: dict[str, dict[int, Degrees]]
    seconds: dict[int, list[float]]
    memory: LayerMemory
    layer_bytes: list[int]
    devices: int
    num_microbatches: int
    fault_tolerance: int
    bytes_per_second: float = math.inf
    keeps_layout: bool = False
    narrowest: dict[str, int] = field(default_factory=dict)
    domains: list[int] = field(default_factory=list)

    def domains_of(self, before: Sequence[Any], now: Sequence[Any]) -> list[int]:
        """Return the NVLink domain of each node in `now`, given the nodes of these costs' plan; a node that joined
        later has one of its own. Returns nothing if no domain joins nodes."""
        known, fresh = dict(zip(before, self.domains)), itertools.count(max(self.domains, default=0) + 1)
        return [known[node] if node in known else next(fresh) for node in now] if self.domains else []

    def to_document(self) -> dict[str, Any]:
        """Return a document that can be written as JSON; `from_document` reads it."""
        document: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return document

    @classmethod
    def from_document(cls, document: Any) -> ChainCosts:
        """Read a document of `to_document`. Raises ValueError for anything else."""
        try:
            costs = msgspec.convert(document, cls, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        count = sum(costs.layers.values())
        tables: list[Sequence[float]] = [*costs.seconds.values(), costs.layer_bytes]
        tables += [*costs.memory.state_bytes.values(), *costs.memory.activation_bytes.values()]
        if not costs.seconds or any(len(table) != count for table in tables):
            raise ValueError(f"the tables of layers do not have {count} entries each")
        return costs


@dataclass(frozen=True, slots=True)
class Membership:
    """The plan of a membership. idle: present ranks in no pipeline, because none uses exactly the nodes that are left.

    num_microbatches: of the pipeline with the most. seconds: of a step; microbatch_seconds: of one microbatch in the
    slowest pipeline. tolerance: nodes that may be lost at once. moved_bytes: as in `NextPipelines`. kept: number of
    unchanged pipelines. early: new pipelines have memory for schedules that keep more microbatches than 1F1B."""

    plan: Plan
    idle: tuple[int, ...]
    num_microbatches: int
    seconds: float
    microbatch_seconds: float
    tolerance: int
    moved_bytes: int
    kept: int
    early: bool


class MembershipPlanner:
    """Plan memberships from the costs of a chain; templates are cached. is_strict: keep running pipelines only if they
    fit memory by these costs."""

    def __init__(self, costs: ChainCosts, is_strict: bool = False) -> None:
        self.costs = costs
        self.is_strict = is_strict
        self._first: dict[str, int] = {}
        for name in costs.layers:
            self._first[name] = sum(costs.layers[other] for other in self._first)
        self._templates: dict[tuple[int, int], dict[int, Template]] = {}
        self._stages: dict[Template, dict[str, list[_TemplateStage]]] = {}

    def first(self, nodes: int) -> Membership:
        """Return the fastest plan of `nodes` nodes. Raises PlanError if they cannot hold the model."""
        size = nodes * self.costs.devices
        nothing = Plan(tuple(UnitPlan(name, (), feeds) for name, feeds in self.costs.feeds.items()))
        return self.next(nothing, {}, [rank // self.costs.devices for rank in range(size)])

    def next(
        self, before: Plan, survivors: Mapping[int, int], node_of: Sequence[int], domain_of: Sequence[int] = ()
    ) -> Membership:
        """Return the plan that follows `before` on the present ranks. `node_of` has the node of each, and `domain_of`
        its NVLink domain, out of which no new stage reaches, if there are such domains.

        survivors: old rank → new rank; other new ranks have no state. Pipelines that lost no rank stay as they are,
        unless others save more time than moving state takes (see `PipelineChooser`). If stages of `before` span
        several nodes, stages of that width are tried first; narrower ones than a node's are tried where ranks would be
        idle. Raises PlanError if the ranks cannot hold the model, which they can if any pipeline fits.
        """
        pipelines = pipelines_of(before)
        whole: dict[tuple[int, ...], Pipeline] = {}
        for ranks, one in ((ranks_of(one), one) for one in pipelines):
            if all(map(survivors.__contains__, ranks)):
                whole[tuple([survivors[rank] for rank in ranks])] = {
                    name: tuple([replica.renamed(survivors) for replica in own]) for name, own in one.items()
                }
        if self.is_strict:
            whole = {ranks: one for ranks, one in whole.items() if self._fits(one)}
        held = self._held(pipelines, survivors)
        widest = max((len(stage.ranks) for one in pipelines for stage in _stages(one)), default=1)
        failure: PlanError | None = None
        found: list[Membership] = []
        own = self.costs.devices
        sizes = [*([widest] if widest > own else []), *(size for size in range(own, 0, -1) if own % size == 0)]
        divisible = {
            size: {ranks: one for ranks, one in whole.items() if _is_divisible(ranks, node_of, size, own)}
            for size in sizes
        }
        # Pipelines that lost nobody are broken up, and tensor parallelism given up, only where nothing else fits.
        least = max(self.costs.narrowest.values(), default=1)
        for size, kept in sorted(divisible.items(), key=lambda each: len(each[1]) < len(whole)):
            if found and (not found[-1].idle or len(kept) < len(whole) or size < least):
                break
            try:
                places = node_of if size <= own else domain_of or [0] * len(node_of)
                found.append(self._on_nodes(kept, held, _nodes([*kept], places, size), size, node_of))
            except PlanError as error:
                failure = failure or error
        if not found:
            raise failure or PlanError("there are no ranks to train on")
        return best_choice(found, self.costs.bytes_per_second)

    def below(self, plan: Plan, rank: int) -> MembershipPlanner:
        """Return a planner for which a stage as full as that of `rank` in `plan`, which ran out of memory, does not
        fit. It is this planner if that is so already."""
        memory, held = self.costs.memory, [self._bytes(one) for one in pipelines_of(plan)]
        used = max((used for each in held for ranks, used in each.items() if rank in ranks), default=math.inf)
        if self.is_strict and memory.capacity_bytes <= used * LESS_MEMORY:
            return self
        less = replace(memory, capacity_bytes=min(memory.capacity_bytes, used * LESS_MEMORY))
        return MembershipPlanner(replace(self.costs, memory=less), is_strict=True)

    def smallest(self, devices: int) -> int | None:
        """Return the number of nodes of `devices` devices in the smallest pipeline that fits memory; None if none."""
        return min(self.templates(devices, len(self.costs.layer_bytes)), default=None)

    def holds_all(self, before: Plan, survivors: Mapping[int, int]) -> bool:
        """Return True if the survivors together hold every layer."""
        spans = [span for own in self._held(pipelines_of(before), survivors).values() for span in own]
        return len({layer for span in spans for layer in range(*span)}) == len(self.costs.layer_bytes)

    def holds_both(self, before: tuple[Plan, int], after: tuple[Plan, int]) -> bool:
        """Return True if a rank's memory holds the state of its parts of two plans at once, as while it rebuilds.
        before, after: the plan, and the rank in it."""
        both = 0.0
        for plan, rank in (before, after):
            for stage, layers, width, _ in itertools.chain(*map(self._layers, pipelines_of(plan))):
                both += sum(self.costs.memory.state_bytes[width][layers]) if rank in stage.ranks else 0.0
        return both <= self.costs.memory.capacity_bytes

    def templates(self, devices: int, most: int) -> dict[int, Template]:
        """Return the templates of up to `most` nodes of `devices` devices that fit memory."""
        costs, key = self.costs, (devices, min(most, sum(self.costs.layers.values())))
        if key not in self._templates:
            widths = {width: seconds for width, seconds in costs.seconds.items() if width <= devices}
            planned = max(costs.num_microbatches, sum(costs.layers.values()))
            searched = {width: self._searched_seconds(width) for width in widths}
            sizes = range(1, key[1] + 1)
            found = plan_templates(searched, sizes, devices, planned, costs.memory, costs.num_microbatches)

            # The papers' T1 + T2 + T3 is too low, even negative, for fewer microbatches than stages, as in long
            # pipelines. Here a step is one microbatch through all stages, plus one bottleneck per further one.
            def timed(template: Template) -> Template:
                stages = [sum(widths[gpus][first:end]) for first, end, gpus in template.stages]
                return replace(template, seconds=sum(stages), bottleneck=max(stages), num_microbatches=1)

            self._templates[key] = {nodes: timed(template) for nodes, template in found.items()}
        return self._templates[key]

    def _searched_seconds(self, width: int) -> list[float]:
        """Return the seconds of each layer on `width` devices for the search of templates. A layer on fewer devices
        than in the run's own layout takes longer than any pipeline, so it is found only where nothing else fits."""
        costs, longer = self.costs, 1.0 + 2.0 * max(map(sum, self.costs.seconds.values()))
        least = [costs.narrowest.get(name, 1) for name, count in costs.layers.items() for _ in range(count)]
        return [own + longer * (width < needed) for own, needed in zip(costs.seconds[width], least)]

    def _on_nodes(
        self,
        whole: Mapping[tuple[int, ...], Pipeline],
        held: Mapping[int, Sequence[LayerSpan]],
        nodes: Sequence[tuple[int, ...]],
        devices: int,
        node_of: Sequence[int],
    ) -> Membership:
        """Return the plan of `nodes`, groups of `devices` ranks; the first groups are those of `whole` pipelines, which
        are given by their ranks."""
        costs, templates = self.costs, self.templates(devices, len(nodes))
        if not templates and not whole:
            smallest = self.smallest(devices)
            raise PlanError(
                f"no pipeline of 1 to {len(nodes)} nodes of {devices} devices holds the model, "
                + (f"the smallest takes {smallest}" if smallest else "nor does a longer one")
                + "; take more nodes or more memory, other tensor-parallel degrees, or recomputation"
            )
        running, used = [], 0
        instances: dict[tuple[int, ...], Pipeline] = {}  # whole pipelines by their nodes
        for ranks, one in whole.items():
            own = tuple(range(used, used + len(ranks) // devices))
            used += len(own)
            template = templates.get(len(own))
            if template is not None and one == self._instance(template, ranks):
                instances[own] = one
                running.append(RunningPipeline(own, node_layers(template, len(own)), template))
            else:
                spans = tuple(self._span(nodes[node], held) for node in own)
                running.append(RunningPipeline(own, spans, self._times(one)))
        chooser = PipelineChooser(
            templates, costs.fault_tolerance, costs.num_microbatches, costs.layer_bytes, costs.bytes_per_second
        )
        loose = {node: self._span(nodes[node], held) for node in range(used, len(nodes))}
        found = chooser.choose(running, loose)
        groups = list(found.made.pipelines) if found.made else []
        if not held:  # no node has state: neighbouring nodes form pipelines
            each = iter(range(len(nodes)))
            groups = [tuple(itertools.islice(each, len(group))) for group in groups]
        made: dict[int, Pipeline] = {}  # one of each length
        all_whole = [*whole.items()]
        ranked = [all_whole[number] for number in found.kept]
        for group in groups:
            ranks = tuple(itertools.chain(*(nodes[node] for node in group)))
            made[len(group)] = instances.get(group) or self._instance(templates[len(group)], ranks)
            ranked.append((ranks, made[len(group)]))
        ranked.sort(key=lambda each: min(each[0]))
        pipelines, busy = [one for _, one in ranked], {rank for ranks, _ in ranked for rank in ranks}
        plan = Plan(
            tuple(
                UnitPlan(
                    name,
                    tuple(replica for one in pipelines for replica in one[name]),
                    costs.feeds[name],
                    costs.recompute[name],
                )
                for name in costs.layers
            )
        )
        tolerance = found.tolerance
        if disjoint([frozenset(node_of[rank] for rank in ranks) for ranks, _ in ranked]) <= tolerance:
            tolerance = min(tolerance, min(copies_on_unlike_nodes(plan, node_of).values()) - 1)
        return Membership(
            plan,
            tuple(sorted({*range(len(node_of))} - busy)),
            max(found.microbatches),
            found.seconds,
            max(
                times.seconds for times in [*(running[k].times for k in found.kept), *map(templates.__getitem__, made)]
            ),
            tolerance,
            found.moved_bytes,
            sum(one == whole.get(ranks) for ranks, one in ranked),
            all(self._fits(one, eager=True) for one in made.values()),
        )

    def _instance(self, template: Template, ranks: tuple[int, ...]) -> Pipeline:
        """Return the instance of a template on these ranks."""
        if template not in self._stages:
            used, stages = 0, {name: list[_TemplateStage]() for name in self.costs.layers}
            for first, end, width in template.stages:
                places = slice(used, used + width)
                used += width
                for name, begin in self._first.items():
                    low, high = max(first - begin, 0), min(end - begin, self.costs.layers[name])
                    if low < high:
                        stages[name].append((low, high, places, self.costs.degrees[name][width]))
            self._stages[template] = stages
        return {
            name: (Replica(tuple([Stage(first, end, ranks[places], *degrees) for first, end, places, degrees in own])),)
            for name, own in self._stages[template].items()
        }

    def _layers(self, pipeline: Pipeline) -> Iterable[tuple[Stage, slice, int, int]]:
        """Yield each stage, its layers in the chain, the number of devices with costs that is nearest to its own, and
        the replicas that share its unit's samples."""
        for name, replicas in pipeline.items():
            for stage in (stage for replica in replicas for stage in replica.stages):
                layers, width = slice(self._first[name] + stage.first, self._first[name] + stage.end), len(stage.ranks)
                if width not in self.costs.seconds:
                    width = min(self.costs.seconds, key=lambda own: (abs(own - len(stage.ranks)), own))
                yield stage, layers, width, len(replicas)

    def _times(self, pipeline: Pipeline) -> Template:
        """Return the times of a pipeline that is no instance of a template, as if its units ran one after another."""
        busy: dict[tuple[int, ...], float] = {}
        for stage, layers, width, replicas in self._layers(pipeline):
            seconds = sum(self.costs.seconds[width][layers]) / replicas
            busy[stage.ranks] = busy.get(stage.ranks, 0.0) + seconds
        return Template((), sum(busy.values()), max(busy.values()), 1)

    def _fits(self, pipeline: Pipeline, eager: bool = False) -> bool:
        return max(self._bytes(pipeline, eager).values()) <= self.costs.memory.capacity_bytes

    def _bytes(self, pipeline: Pipeline, eager: bool = False) -> dict[tuple[int, ...], float]:
        """Return ranks of a stage → bytes of each, as if the units ran one after another in (eager) 1F1B."""
        memory, held = self.costs.memory, dict[tuple[int, ...], list[float]]()
        for stage, layers, width, _ in self._layers(pipeline):
            own = held.setdefault(stage.ranks, [0.0, 0.0])
            own[0] += sum(memory.state_bytes[width][layers])
            own[1] += sum(memory.activation_bytes[width][layers])
        depths = range(len(held) + memory.early, memory.early, -1)
        return {
            ranks: state + min(2 * depth - 1 if eager else depth, self.costs.num_microbatches) * kept
            for (ranks, (state, kept)), depth in zip(held.items(), depths)
        }

    def _held(self, pipelines: Iterable[Pipeline], survivors: Mapping[int, int]) -> dict[int, list[LayerSpan]]:
        """Return new rank → the spans of the chain's layers that it holds."""
        held: dict[int, list[LayerSpan]] = {}
        for stage, layers, _, _ in (each for one in pipelines for each in self._layers(one)):
            for rank in stage.ranks:
                if rank in survivors:
                    held.setdefault(survivors[rank], []).append((layers.start, layers.stop))
        return held

    def _span(self, ranks: Iterable[int], held: Mapping[int, Sequence[LayerSpan]]) -> LayerSpan:
        """Return the largest span, by bytes, of consecutive layers that these ranks hold together; (0, 0) if none."""
        joined: list[LayerSpan] = [(0, 0)]
        for first, end in sorted(span for rank in ranks for span in held.get(rank, ())):
            if first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((first, end))
        return max(joined, key=lambda span: sum(self.costs.layer_bytes[slice(*span)]))


def pipelines_of(plan: Plan) -> list[Pipeline]:
    """Return the pipelines of a plan: sets of replicas of all units that work together and share no rank with others.

    If all units have n replicas, replicas of the same number work together, else equal shares of each unit's replicas.
    """
    counts = [len(unit.replicas) for unit in plan.units]
    parts = math.gcd(*counts)
    home: dict[int, int] = {}
    joined = list(range(parts))
    for unit, count in zip(plan.units, counts):
        for number, replica in enumerate(unit.replicas):
            part = number * parts // count
            for rank in (rank for stage in replica.stages for rank in stage.ranks):
                one, other = joined[part], joined[home.setdefault(rank, part)]
                if one != other:
                    joined = [min(one, other) if each in (one, other) else each for each in joined]
    found: dict[int, dict[str, tuple[Replica, ...]]] = {part: {} for part in sorted({*joined})}
    for unit, count in zip(plan.units, counts):
        for number, replica in enumerate(unit.replicas):
            own = found[joined[number * parts // count]]
            own[unit.name] = (*own.get(unit.name, ()), replica)
    return list(found.values())


def _stages(pipeline: Pipeline) -> Iterable[Stage]:
    return (stage for replicas in pipeline.values() for replica in replicas for stage in replica.stages)


def ranks_of(pipeline: Pipeline) -> tuple[int, ...]:
    """Return the ranks of a pipeline, in the order of its stages."""
    own = (replica.stages for replicas in pipeline.values() for replica in replicas)
    return tuple({rank: None for stages in own for stage in stages for rank in stage.ranks})


def _is_divisible(ranks: tuple[int, ...], node_of: Sequence[int], devices: int, own: int) -> bool:
    """Return True if the ranks of a pipeline are whole groups of `devices` ranks (see `_nodes`)."""
    if devices == 1:
        return True
    groups = [ranks[k : k + devices] for k in range(0, len(ranks), devices)]
    return len(ranks) % devices == 0 and (
        devices > own or all(len({node_of[rank] for rank in group}) == 1 for group in groups)
    )


def _nodes(whole: Sequence[tuple[int, ...]], place_of: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Divide ranks into groups of `devices` ranks, those of `whole` pipelines first. Each other group lies in one place
    (a node or, if it has more ranks than a node, an NVLink domain); ranks that fill no group are left out."""
    groups = [*whole]
    busy = {rank for group in groups for rank in group}
    loose = sorted((rank for rank in range(len(place_of)) if rank not in busy), key=place_of.__getitem__)
    groups += [tuple(ranks) for _, ranks in itertools.groupby(loose, key=place_of.__getitem__)]
    return [group[k : k + devices] for group in groups for k in range(0, len(group) + 1 - devices, devices)]
