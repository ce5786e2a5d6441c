"""Reactions: strategies for continuing training after a change of membership, which a replay compares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dilatant.plan.errors import PlanError
from dilatant.plan.replay.node_trace import NodeTrace
from dilatant.plan.replay.replay import Reaction, RecoveryCosts, Replay, RunningPipelines, replay
from dilatant.plan.templates.compose import compose_pipelines, lines, share_microbatches
from dilatant.plan.templates.reinstantiate import Reinstantiation, node_layers, reinstantiate
from dilatant.plan.templates.templates import Template

_STOPPED = RunningPipelines((), math.inf)


def from_templates(
    templates: Mapping[int, Template],
    fault_tolerance: int,
    num_microbatches: int,
    layer_bytes: Sequence[int] | None = None,
    slack: float = 0.0,
) -> Reaction:
    """Reinstantiate pipelines from the survivors (Oobleck, the thesis, 2.5; arguments as in `reinstantiate`).

    With too few nodes for fault_tolerance + 1 replicas, training continues with as many as possible. Nodes that no
    composition can use stay idle until the next change. State is read from a checkpoint only if no surviving node holds
    some layer.
    """
    spans = {size: node_layers(template, size) for size, template in templates.items()}
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
        if idle > len(dropped):  # also idle nodes with layers, from the end of the last pipelines on
            order = [node for nodes in reversed(old) for node in reversed(nodes) if node in alive]
            dropped = [*dropped, *order[: idle - len(dropped)]]
        if not old:
            return _fresh(templates, sorted(alive - set(dropped)), tolerance, num_microbatches, before)
        change = reinstantiate(
            templates,
            old,
            running - alive | running & set(dropped),
            tolerance,
            num_microbatches,
            layer_bytes,
            joined=[node for node in joined if node not in set(dropped)],
            slack=slack,
        )
        pipelines = tuple(pipeline.nodes for pipeline in change.pipelines)
        return RunningPipelines(
            pipelines,
            change.seconds,
            _busiest_link(change),
            kept=_state_kept(old, alive, spans),
            in_flight_seconds=_one_microbatch(templates, pipelines, num_microbatches),
        )

    return react


def restart_from_checkpoint(templates: Mapping[int, Template], num_microbatches: int) -> Reaction:
    """Restart all processes from the last checkpoint at every change, on a grid: equal pipelines, other nodes idle.

    The grid is the fastest over all pipeline sizes. Checkpoint-based elastic training works this way (Varuna, the
    baseline in the thesis, 2.7).
    """

    def grid(nodes: int) -> tuple[float, int]:
        """Return (seconds of a step, nodes of each pipeline) of the fastest grid."""
        best = (math.inf, 0)
        for size in sorted(templates):
            replicas = min(nodes // size, num_microbatches)
            if replicas:
                best = min(
                    best, (share_microbatches(templates, [size] * replicas, num_microbatches)[1], size)
                )
        return best

    known: dict[int, tuple[float, int]] = {}

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        if len(alive) not in known:
            known[len(alive)] = grid(len(alive))
        seconds, size = known[len(alive)]
        if not size:
            return _STOPPED
        ordered = sorted(alive)
        replicas = min(len(ordered) // size, num_microbatches)
        pipelines = tuple(tuple(ordered[first : first + size]) for first in range(0, replicas * size, size))
        return RunningPipelines(pipelines, seconds, restarted=True)

    return react


def compare_recovery(
    trace: NodeTrace,
    templates: Mapping[int, Template],
    fault_tolerance: int,
    num_microbatches: int,
    samples_per_microbatch: float,
    layer_bytes: Sequence[int] | None = None,
    costs: RecoveryCosts | None = None,
) -> tuple[Replay, ...]:
    """Replay one trace three times: pipelines from templates, restarts from a checkpoint, and free recovery.

    Templates need checkpoints only for losses that no replica survives; these are saved in the background, so
    `costs.checkpoint_seconds` applies only to the restarts. The last replay is an upper bound of the first.
    """
    costs = costs or RecoveryCosts()
    samples = num_microbatches * samples_per_microbatch
    ours = from_templates(templates, fault_tolerance, num_microbatches, layer_bytes)
    restart = restart_from_checkpoint(templates, num_microbatches)
    background, free = replace(costs, checkpoint_seconds=0.0), RecoveryCosts(0.0, math.inf, 0.0, 1, 0.0, 1.0)
    runs = (
        ("templates", ours, background),
        ("restart from checkpoint", restart, replace(costs, keeps_pipelines=False)),
        ("templates at no cost", without_cost(ours), free),
    )
    return tuple(
        replay(name, trace, reaction, samples, spent, fault_tolerance + 1) for name, reaction, spent in runs
    )


def without_cost(reaction: Reaction) -> Reaction:
    """Return the same pipelines without recovery costs: an upper bound of the throughput of such a reaction."""

    def react(before: RunningPipelines | None, alive: frozenset[int]) -> RunningPipelines:
        after = reaction(before, alive)
        return RunningPipelines(after.pipelines, after.step_seconds)

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
            (most[total - size] + 1 for size in sizes if size <= total and most[total - size] >= 0),
            default=-1,
        )
    return max(most[number], 0)


def _fresh(
    templates: Mapping[int, Template],
    nodes: list[int],
    tolerance: int,
    num_microbatches: int,
    before: RunningPipelines | None,
) -> RunningPipelines:
    """Return the first composition, or the one after a stop, whose state comes from a checkpoint."""
    try:
        composition = compose_pipelines(templates, len(nodes), tolerance, num_microbatches)
    except PlanError:
        return _STOPPED
    pipelines, used = [], 0
    for size, _ in composition.pipelines:
        pipelines.append(tuple(nodes[used : used + size]))
        used += size
    return RunningPipelines(
        tuple(pipelines),
        composition.seconds,
        kept=before is None,
        in_flight_seconds=_one_microbatch(templates, pipelines, num_microbatches),
    )


def _one_microbatch(
    templates: Mapping[int, Template], pipelines: Sequence[Sequence[int]], num_microbatches: int
) -> float:
    """Return the longest time in seconds of one microbatch alone, forward and backward, over these pipelines."""
    seconds, bottleneck, planned = lines(templates, [len(nodes) for nodes in pipelines], num_microbatches)
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


def _busiest_link(change: Reinstantiation) -> int:
    """Return the most bytes that one node sends or receives."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for copy in change.copies:
        received[copy.target] += copy.num_bytes
        if copy.source is not None:
            sent[copy.source] += copy.num_bytes
    return max((*sent.values(), *received.values()), default=0)
