"""Reinstantiation: new pipelines after nodes were lost or joined, with the fewest bytes copied."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dilatant.plan.errors import PlanError
from dilatant.plan.templates.compose import compose_pipelines, lines, share_microbatches
from dilatant.plan.templates.templates import Template

LayerSpan = tuple[int, int]


@dataclass(frozen=True, slots=True)
class NodePipeline:
    """An instance of the template of len(nodes) nodes: `nodes` in pipeline order, and its microbatches."""

    nodes: tuple[int, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The copy of `layer` from node `source` to node `target`; source None: no node holds the layer any more."""

    layer: int
    source: int | None
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reinstantiation:
    """Pipelines after a change of membership, and the copies that must precede training.

    `seconds` is the slowest pipeline's time, `lower_bound` that of the fastest composition. `fewest_bytes` is True if
    every composition within the allowed time was compared.
    """

    pipelines: tuple[NodePipeline, ...]
    copies: tuple[LayerCopy, ...]
    seconds: float
    fewest_bytes: bool
    lower_bound: float

    @property
    def moved_bytes(self) -> int:
        """Bytes copied between nodes (or read from a checkpoint, for lost layers)."""
        return sum(copy.num_bytes for copy in self.copies)

    @property
    def busiest_bytes(self) -> int:
        """Most bytes that one node sends or receives."""
        sent, received = Counter[int](), Counter[int]()
        for copy in self.copies:
            received[copy.target] += copy.num_bytes
            if copy.source is not None:
                sent[copy.source] += copy.num_bytes
        return max((*sent.values(), *received.values()), default=0)


def reinstantiate(
    templates: Mapping[int, Template],
    pipelines: Sequence[Sequence[int]],
    lost: Iterable[int],
    fault_tolerance: int,
    num_microbatches: int,
    layer_bytes: Sequence[int] | None = None,
    joined: Iterable[int] | Mapping[int, LayerSpan] = (),
    slack: float = 0.0,
    budget: int = 200,
) -> Reinstantiation:
    """Choose pipelines for the present nodes, and place nodes in them so that the fewest bytes move.

    `pipelines` are the running pipelines as node ids in pipeline order, each an instance of the template of its length;
    `lost` nodes are gone, `joined` nodes are in no such pipeline: new and empty, or with the layers that they map to.
    `layer_bytes[k]` are the bytes of layer k that a holder
    must receive (weights and optimizer state; default 1 each).

    The composition is the fastest (`compose_pipelines`), or one within a fraction `slack` of its time; among these, one
    that moves the fewest bytes. Up to `budget` compositions as fast as the fastest are compared, and as many slower
    ones, those most like the running one first. Placement is exact: pipelines that continue under their template stay
    as they are (never worse, since missing layers obey the triangle inequality), the others follow from a transport
    problem over the layers that nodes hold. The thesis' simple, borrowing and merging reinstantiation are outcomes, not
    separate cases. Each copy comes from the holder that has sent least.

    Raises the errors of `compose_pipelines`, and PlanError for nodes that are unknown or named twice.

    Source: Oobleck (the thesis, 2.5.1); here donors are chosen by fewest bytes.
    """
    held: dict[int, LayerSpan] = (
        dict(joined) if isinstance(joined, Mapping) else dict.fromkeys(sorted(set(joined)), (0, 0))
    )
    lost = set(lost)
    _check(templates, pipelines, lost, sorted(held))
    num_layers = next(iter(templates.values())).stages[-1][1]
    prefix = np.concatenate([[0], np.cumsum(layer_bytes if layer_bytes is not None else [1] * num_layers)])
    if prefix.size != num_layers + 1:
        raise PlanError(f"layer_bytes has {prefix.size - 1} entries for {num_layers} layers")
    spans = {size: node_layers(template, size) for size, template in templates.items()}
    home: dict[int, int] = {}
    for number, nodes in enumerate(pipelines):
        for node, span in zip(nodes, spans[len(nodes)]):
            if node not in lost:
                held[node], home[node] = span, number
    fastest = compose_pipelines(templates, len(held), fault_tolerance, num_microbatches)
    intact: dict[int, list[int]] = defaultdict(list)
    for number, nodes in enumerate(pipelines):
        if not lost.intersection(nodes):
            intact[len(nodes)].append(number)

    # Compositions as fast as the fastest are always compared, so that more slack never means more bytes.
    compositions, complete = [Counter(size for size, _ in fastest.pipelines)], False
    for limit in dict.fromkeys((fastest.seconds, fastest.seconds + slack * abs(fastest.seconds))):
        more, complete = _compositions(
            templates, intact, limit, len(held), fault_tolerance + 1, num_microbatches, budget
        )
        compositions += more
    best_bytes, best_sizes, best_flow = -1, Counter[int](), {}
    for sizes in compositions:
        moved, flow = _place(sizes, intact, pipelines, held, spans, prefix)
        if best_bytes < 0 or moved < best_bytes:
            best_bytes, best_sizes, best_flow = moved, sizes, flow
        if best_bytes == 0:
            complete = True
            break

    placed = _group(best_sizes, best_flow, intact, pipelines, held, home, spans)
    counts, seconds = share_microbatches([templates[len(nodes)] for nodes in placed], num_microbatches)
    return Reinstantiation(
        pipelines=tuple(map(NodePipeline, placed, counts)),
        copies=_copies(placed, held, spans, prefix),
        seconds=seconds,
        fewest_bytes=complete,
        lower_bound=fastest.seconds,
    )


def node_layers(template: Template, nodes: int) -> tuple[LayerSpan, ...]:
    """Return (first layer, end layer) held by each of the template's `nodes` nodes, in pipeline order."""
    gpus_per_node = sum(gpus for _, _, gpus in template.stages) // nodes
    spans: list[LayerSpan] = []
    used = 0
    for first, end, gpus in template.stages:
        if used % gpus_per_node == 0:
            spans.append((first, end))
        else:
            spans[-1] = (spans[-1][0], end)
        used += gpus
    return tuple(spans)


def _check(
    templates: Mapping[int, Template], pipelines: Sequence[Sequence[int]], lost: set[int], joined: list[int]
) -> None:
    problems = []
    running = Counter(node for nodes in pipelines for node in nodes)
    if twice := sorted(node for node, count in running.items() if count > 1):
        problems.append(f"nodes {twice} are in several pipelines")
    if unknown := sorted(lost - running.keys()):
        problems.append(f"lost nodes {unknown} are in no pipeline")
    if known := [node for node in joined if node in running]:
        problems.append(f"joined nodes {known} are already in a pipeline")
    if missing := sorted({len(nodes) for nodes in pipelines} - templates.keys()):
        problems.append(f"there is no template of {missing} nodes, yet such pipelines run")
    if problems:
        raise PlanError("; ".join(problems))


def _compositions(
    templates: Mapping[int, Template],
    intact: Mapping[int, list[int]],
    limit: float,
    num_nodes: int,
    fewest: int,
    num_microbatches: int,
    budget: int,
) -> tuple[list[Counter[int]], bool]:
    """Return compositions {size: pipelines} that finish within `limit` seconds, and True if these are all."""
    from dilatant.plan.templates._compose_kernel import microbatches_within
    from dilatant.plan.templates._reinstantiate_kernel import enumerate_compositions

    sizes = sorted(templates, key=lambda size: (-len(intact.get(size, ())) * size, -size))
    found, complete = enumerate_compositions(
        np.array(sizes, np.int64),
        microbatches_within(
            limit, *lines([templates[size] for size in sizes], num_microbatches), num_microbatches
        ),
        np.array([len(intact.get(size, ())) for size in sizes], np.int64),
        num_nodes,
        fewest,
        num_microbatches,
        budget,
        budget * 10 * len(sizes),
    )
    return [Counter({s: n for s, n in zip(sizes, row) if n}) for row in found.tolist()], complete


def _place(
    sizes: Counter[int],
    intact: Mapping[int, list[int]],
    pipelines: Sequence[Sequence[int]],
    held: Mapping[int, LayerSpan],
    spans: Mapping[int, tuple[LayerSpan, ...]],
    prefix: np.ndarray,
) -> tuple[int, dict[tuple[LayerSpan, LayerSpan], int]]:
    """Return (bytes that move, {(layers held, layers wanted): nodes}) for the nodes of pipelines that are not kept."""
    from dilatant.plan.templates._reinstantiate_kernel import transport

    free, wanted = Counter(held.values()), Counter[LayerSpan]()
    for size, count in sizes.items():
        kept = min(count, len(intact.get(size, ())))
        for span in spans[size]:
            free[span] -= kept
            wanted[span] += count - kept
    have = sorted(span for span, count in free.items() if count)
    want = sorted(span for span, count in wanted.items() if count)
    if not want:
        return 0, {}
    cost = np.array([[_missing(h, w, prefix) for w in want] for h in have], np.int64)
    flow = transport(
        cost,
        np.array([free[span] for span in have], np.int64),
        np.array([wanted[span] for span in want], np.int64),
    )
    moves = {(have[i], want[j]): int(flow[i, j]) for i, j in zip(*np.nonzero(flow))}
    return int((flow * cost).sum()), moves


def _missing(held: LayerSpan, wanted: LayerSpan, prefix: np.ndarray) -> int:
    """Return the bytes of `wanted` outside `held`."""
    first, end = max(held[0], wanted[0]), min(held[1], wanted[1])
    common = int(prefix[end] - prefix[first]) if first < end else 0
    return int(prefix[wanted[1]] - prefix[wanted[0]]) - common


def _group(
    sizes: Counter[int],
    flow: Mapping[tuple[LayerSpan, LayerSpan], int],
    intact: Mapping[int, list[int]],
    pipelines: Sequence[Sequence[int]],
    held: Mapping[int, LayerSpan],
    home: Mapping[int, int],
    spans: Mapping[int, tuple[LayerSpan, ...]],
) -> list[tuple[int, ...]]:
    """Return node ids of every pipeline, the largest first; nodes of one old pipeline stay together if possible."""
    placed: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for size, count in sizes.items():
        for number in intact.get(size, ())[:count]:
            placed.append(tuple(pipelines[number]))
            taken.update(pipelines[number])
    by_span: dict[LayerSpan, list[int]] = defaultdict(list)
    for node in sorted(held, key=lambda node: (home.get(node, len(pipelines)), node), reverse=True):
        if node not in taken:
            by_span[held[node]].append(node)
    ready: dict[LayerSpan, list[int]] = defaultdict(list)  # layers → nodes that will hold them
    for (have, want), count in sorted(flow.items()):
        for _ in range(count):
            ready[want].append(by_span[have].pop())
    for size in sorted(sizes, reverse=True):
        for _ in range(sizes[size] - min(sizes[size], len(intact.get(size, ())))):
            homes = Counter(
                origin for span in spans[size] for origin in {home.get(node) for node in ready[span]}
            )
            order = {origin: rank for rank, (origin, _) in enumerate(homes.most_common())}
            nodes = []
            for span in spans[size]:
                node = min(ready[span], key=lambda node: (order.get(home.get(node), len(order)), node))
                ready[span].remove(node)
                nodes.append(node)
            placed.append(tuple(nodes))
    return sorted(placed, key=lambda nodes: (-len(nodes), nodes))


def _copies(
    placed: Sequence[tuple[int, ...]],
    held: Mapping[int, LayerSpan],
    spans: Mapping[int, tuple[LayerSpan, ...]],
    prefix: np.ndarray,
) -> tuple[LayerCopy, ...]:
    holders: dict[int, list[tuple[int, int]]] = defaultdict(
        list
    )  # layer → heap of (bytes sent when queued, node)
    for node in sorted(held):
        for layer in range(*held[node]):
            holders[layer].append((0, node))
    sent: Counter[int] = Counter()
    copies = []
    for nodes in placed:
        for target, (first, end) in zip(nodes, spans[len(nodes)]):
            for layer in range(first, end):
                if held[target][0] <= layer < held[target][1]:
                    continue
                num_bytes = int(prefix[layer + 1] - prefix[layer])
                queue = holders.get(layer)
                if not queue:
                    copies.append(LayerCopy(layer, None, target, num_bytes))
                    continue
                while queue[0][0] < sent[queue[0][1]]:  # sent more since it was queued
                    heapq.heapreplace(queue, (sent[queue[0][1]], queue[0][1]))
                source = queue[0][1]
                sent[source] += num_bytes
                copies.append(LayerCopy(layer, source, target, num_bytes))
    return tuple(copies)
