"""Reaction to node failures with given templates (Oobleck), in which nodes that no composition uses stay idle; and the
nodes of a part of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from dilatant.plan.replay.node_trace import NodeEvent, NodeTrace
from dilatant.plan.replay.replay import Reaction, RunningPipelines
from dilatant.plan.templates.reinstantiate import LayerSpan, PipelineChooser, RunningPipeline, node_layers
from dilatant.plan.templates.templates import Template, lines

_STOPPED = RunningPipelines((), math.inf)


def mean_nodes(trace: NodeTrace) -> float:
    """Return the time average of the nodes alive from the first event on."""
    counts = trace.counts()
    ends = [*(seconds for seconds, _ in counts[1:]), trace.seconds]
    area = sum((end - start) * alive for (start, alive), end in zip(counts, ends))
    return area / (trace.seconds - counts[0][0]) if trace.seconds > counts[0][0] else 0.0


def within(trace: NodeTrace, start: float, end: float) -> NodeTrace:
    """Return the part from `start` to `end` seconds, counted from `start`; nodes alive at `start` join at 0."""
    alive: set[int] = set()
    events: list[NodeEvent] = []
    for event in trace.events:
        if event.seconds >= end:
            break
        if event.seconds <= start:
            alive = (alive | set(event.joined)) - set(event.lost)
        else:
            events.append(NodeEvent(event.seconds - start, event.joined, event.lost))
    first = (NodeEvent(0.0, tuple(sorted(alive)), ()),) if alive else ()
    return NodeTrace(trace.name, (*first, *events), min(end, trace.seconds) - start, trace.unit)


def from_templates(
    templates: Mapping[int, Template],
    fault_tolerance: int,
    num_microbatches: int,
    layer_bytes: Sequence[int] | None = None,
) -> Reaction:
    """Return the reaction that chooses pipelines for the survivors (Oobleck, the thesis, 2.5; see `PipelineChooser`).

    Nodes that no composition can use stay idle until the next change. State is read from a checkpoint only if no
    surviving node holds some layer.
    """
    spans = {size: node_layers(template, size) for size, template in templates.items()}
    chooser = PipelineChooser(templates, fault_tolerance, num_microbatches, layer_bytes)
    usable = _usable(templates, fault_tolerance, num_microbatches * max(templates))

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        number, tolerance = usable(len(alive))
        if not number or num_microbatches < tolerance + 1:
            return _STOPPED
        old = before.pipelines if before else ()
        running = {node for nodes in old for node in nodes}
        idle = len(alive) - number
        joined = sorted(alive - running)
        dropped = joined[len(joined) - min(idle, len(joined)) :] if idle else []
        if idle > len(dropped):  # nodes with layers become idle, too, from the end of the last pipelines on
            order = [node for nodes in reversed(old) for node in reversed(nodes) if node in alive]
            dropped = [*dropped, *order[: idle - len(dropped)]]
        left = set(dropped)
        others: dict[int, LayerSpan] = {node: (0, 0) for node in joined if node not in left}
        for nodes in old:
            if not left.isdisjoint(nodes) or not alive.issuperset(nodes):
                here = zip(nodes, spans[len(nodes)])
                others |= {node: span for node, span in here if node in alive and node not in left}
        instances = [
            RunningPipeline(nodes, spans[len(nodes)], templates[len(nodes)])
            for nodes in old
            if left.isdisjoint(nodes) and alive.issuperset(nodes)
        ]
        change = chooser.choose(instances, others)
        pipelines = [instances[kept].nodes for kept in change.kept]
        pipelines += change.made.pipelines if change.made else []
        return RunningPipelines(
            tuple(pipelines),
            change.seconds,
            change.moved_bytes if old else 0,
            kept=_state_kept(old, alive, spans) if old else before is None,
            in_flight_seconds=_one_microbatch([templates[len(nodes)] for nodes in pipelines], num_microbatches),
        )

    return react


def _usable(
    templates: Mapping[int, Template], fault_tolerance: int, most_nodes: int
) -> Callable[[int], tuple[int, int]]:
    """Return a function: nodes → (usable nodes, fault tolerance up to the requested one); (0, 0) when none is usable.
    `most_nodes` is the largest number with work, since every pipeline needs a microbatch."""
    sizes = sorted(templates)
    known: dict[int, tuple[int, int]] = {}

    def search(nodes: int) -> tuple[int, int]:
        for number in range(min(nodes, most_nodes), sizes[0] - 1, -1):
            most = _most_parts(number, sizes)
            if most:
                return number, min(fault_tolerance, most - 1)
        return 0, 0

    def usable(nodes: int) -> tuple[int, int]:
        if nodes not in known:
            known[nodes] = search(nodes)
        return known[nodes]

    return usable


def _most_parts(number: int, sizes: Iterable[int]) -> int:
    """Return the largest count of `sizes`, with repetition, that add up to `number`; 0 when none do."""
    most = [0] + [-1] * number
    for total in range(1, number + 1):
        most[total] = max(
            (most[total - size] + 1 for size in sizes if size <= total and most[total - size] >= 0), default=-1
        )
    return max(most[number], 0)


def _one_microbatch(pipelines: Sequence[Template], num_microbatches: int) -> float:
    """Return the longest time in seconds of one microbatch alone, forward and backward, over these pipelines."""
    seconds, bottleneck, planned = lines(pipelines, num_microbatches)
    return float((seconds - (planned - 1) * bottleneck).max())


def _state_kept(
    old: Sequence[Sequence[int]], alive: frozenset[int], spans: Mapping[int, tuple[tuple[int, int], ...]]
) -> bool:
    """Return True if surviving nodes of the old pipelines hold every layer."""
    held: set[int] = set()
    for nodes in old:
        for node, (first, end) in zip(nodes, spans[len(nodes)]):
            if node in alive:
                held.update(range(first, end))
    return not old or len(held) == spans[len(old[0])][-1][1]
