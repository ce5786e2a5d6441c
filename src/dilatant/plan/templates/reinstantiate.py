"""Reinstantiation: new pipelines after nodes were lost or joined, with the fewest bytes copied; and the choice of the
pipelines that continue."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np

from dilatant.plan.errors import BatchError, PlanError
from dilatant.plan.templates.templates import Template, compose_pipelines, lines, most_nodes, share_microbatches

LayerSpan = tuple[int, int]

COMPOSITIONS, COMPARED_NODES = 200, 1 << 14
"""Number of equally fast compositions that are compared by the bytes that move; for many nodes, as many as have
COMPARED_NODES together."""


@dataclass(frozen=True, slots=True)
class LayerCopy:
    """The copy of `layer` from node `source` to node `target`; source None: no node holds the layer any more."""

    layer: int
    source: int | None
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reinstantiation:
    """Pipelines after a change of membership, as nodes in pipeline order, and the copies that must precede training.
    Nodes in no pipeline are idle."""

    pipelines: tuple[tuple[int, ...], ...]
    copies: tuple[LayerCopy, ...]

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
    others: Mapping[int, LayerSpan],
    fault_tolerance: int,
    num_microbatches: int,
    layer_bytes: Sequence[int] | None = None,
    idle: int = 0,
) -> Reinstantiation:
    """Choose pipelines for all present nodes but `idle`, and place nodes in them so that the fewest bytes move.

    `pipelines` are the running pipelines as node ids in pipeline order, each an instance of the template of its length;
    `others` are nodes in no such pipeline, with the layers that they hold. `layer_bytes[k]` are the bytes of layer k
    that a holder must receive (weights and optimizer state; default 1 each).

    The composition is a fastest one (`compose_pipelines`): of several equally fast ones (see `COMPOSITIONS`),
    enumerated from the one most similar to the running one, it moves the fewest bytes. Placement is exact: pipelines
    whose template is still used stay as they are (never worse, since missing layers obey the triangle inequality); the
    others follow from a transport problem over the layers that nodes hold. The thesis' simple, borrowing and merging
    reinstantiation are outcomes, not separate cases. Each copy comes from the holder that has sent least.

    Raises the errors of `compose_pipelines`.

    Source: Oobleck (the thesis, 2.5.1); here donors are chosen by fewest bytes.
    """
    if layer_bytes is None:
        layer_bytes = [1] * max((template.stages[-1][1] for template in templates.values()), default=0)
    prefix = np.concatenate([[0], np.cumsum(layer_bytes)])
    held, home, intact = dict(others), dict[int, int](), defaultdict[int, list[int]](list)
    for number, nodes in enumerate(pipelines):
        home |= dict.fromkeys(nodes, number)
        intact[len(nodes)].append(number)
    used = len(held) + len(home) - idle
    fastest = compose_pipelines(templates, used, fault_tolerance, num_microbatches)
    compositions = [Counter(size for size, _ in fastest.pipelines)]
    compositions += _compositions(templates, intact, fastest.seconds, used, fault_tolerance + 1, num_microbatches)
    spans = {size: node_layers(templates[size], size) for size in {*intact, *itertools.chain(*compositions)}}
    for nodes in pipelines:
        held |= zip(nodes, spans[len(nodes)])
    there = Counter(held.values())
    sizes, flow = _place(compositions, intact, there, spans, prefix, idle)
    placed = _group(sizes, flow, intact, pipelines, held, home, spans)
    return Reinstantiation(tuple(placed), _copies(placed, held, spans, prefix))


@lru_cache(maxsize=1024)
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


def _compositions(
    templates: Mapping[int, Template],
    intact: Mapping[int, list[int]],
    limit: float,
    num_nodes: int,
    fewest: int,
    num_microbatches: int,
) -> list[Counter[int]]:
    """Return compositions {size: pipelines} that finish within `limit` seconds."""
    from dilatant.plan.templates._compose_kernel import microbatches_within
    from dilatant.plan.templates._reinstantiate_kernel import enumerate_compositions

    sizes = sorted(templates, key=lambda size: (-len(intact.get(size, ())) * size, -size))
    most = max(1, min(COMPOSITIONS, COMPARED_NODES // max(1, num_nodes)))
    found, _ = enumerate_compositions(
        np.array(sizes, np.int64),
        microbatches_within(limit, *lines([templates[size] for size in sizes], num_microbatches), num_microbatches),
        np.array([len(intact.get(size, ())) for size in sizes], np.int64),
        num_nodes,
        fewest,
        num_microbatches,
        most,
        most * 10 * len(sizes),
    )
    return [Counter({s: n for s, n in zip(sizes, row) if n}) for row in found.tolist()]


def _place(
    compositions: Sequence[Counter[int]],
    intact: Mapping[int, list[int]],
    there: Counter[LayerSpan],
    spans: Mapping[int, tuple[LayerSpan, ...]],
    prefix: np.ndarray,
    idle: int,
) -> tuple[Counter[int], dict[tuple[LayerSpan, LayerSpan], int]]:
    """Return the composition for which the fewest bytes move (the first of equals), and where its nodes come from. That
    is {(layers held, layers wanted): nodes} for the nodes of pipelines that are not kept; `idle` nodes want (0, 0).
    there: layers held → nodes."""
    from dilatant.plan.templates._reinstantiate_kernel import transport

    sizes = sorted({*itertools.chain(*compositions)})
    known = sorted({(0, 0), *there, *(span for size in sizes for span in spans[size])})
    number = {span: at for at, span in enumerate(known)}
    uses = np.zeros((len(sizes), len(known)), np.int64)
    for row, size in zip(uses, sizes):
        for span in spans[size]:
            row[number[span]] += 1
    counts = np.array([[each[size] for size in sizes] for each in compositions], np.int64)
    kept = np.minimum(counts, [len(intact.get(size, ())) for size in sizes])
    holding = [number[span] for span in sorted(there)]
    free = np.array([there[span] for span in sorted(there)], np.int64) - kept @ uses[:, holding]
    wanted = (counts - kept) @ uses
    wanted[:, number[0, 0]] += idle
    # Bytes wanted outside those held: [held, wanted].
    spans_of = np.array(known)
    one, other = spans_of[holding, None], spans_of[None]
    first, end = np.maximum(one[..., 0], other[..., 0]), np.minimum(one[..., 1], other[..., 1])
    cost = np.subtract(*prefix[spans_of.T[::-1]]) - np.where(first < end, prefix[end] - prefix[first], 0)
    best, least = compositions[0], -1
    moves: dict[tuple[LayerSpan, LayerSpan], int] = {}
    for sizes_now, have, want in zip(compositions, free, wanted):
        rows, columns = np.flatnonzero(have), np.flatnonzero(want)
        part = cost[np.ix_(rows, columns)]
        # No flow costs less than one in which the nearest supply serves each demand.
        if least < 0 or np.min(part, axis=0, initial=1 << 62) @ want[columns] < least:
            flow = transport(part, have[rows], want[columns])
            if least < 0 or (flow * part).sum() < least:
                best, least = sizes_now, int((flow * part).sum())
                moves = {
                    (known[holding[rows[i]]], known[columns[j]]): int(flow[i, j]) for i, j in zip(*np.nonzero(flow))
                }
        if least == 0:
            break
    return best, moves


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
            homes = Counter(origin for span in spans[size] for origin in {home.get(node) for node in ready[span]})
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
    missing = [
        (target, layer)
        for nodes in placed
        for target, span in zip(nodes, spans[len(nodes)])
        if span != held[target]
        for layer in range(*span)
        if not held[target][0] <= layer < held[target][1]
    ]
    nodes_of: dict[LayerSpan, list[int]] = defaultdict(list)
    for node in sorted(held) if missing else ():
        nodes_of[held[node]].append(node)
    queues: dict[tuple[LayerSpan, ...], list[tuple[int, int]]] = {}  # spans → heap of (bytes sent when queued, node)
    holders = {}  # layer → heap of those that have it, shared by layers that the same nodes have
    for layer in {layer for _, layer in missing}:
        around = tuple(span for span in nodes_of if span[0] <= layer < span[1])
        if around not in queues:
            queues[around] = sorted((0, node) for span in around for node in nodes_of[span])
        holders[layer] = queues[around]
    sent: Counter[int] = Counter()
    copies = []
    for target, layer in missing:
        num_bytes = int(prefix[layer + 1] - prefix[layer])
        queue = holders[layer]
        if not queue:
            copies.append(LayerCopy(layer, None, target, num_bytes))
            continue
        while queue[0][0] < sent[queue[0][1]]:  # sent more since it was queued
            heapq.heapreplace(queue, (sent[queue[0][1]], queue[0][1]))
        source = queue[0][1]
        sent[source] += num_bytes
        copies.append(LayerCopy(layer, source, target, num_bytes))
    return tuple(copies)


STABLE_SECONDS = 600.0
"""Assumed time until the next change of membership, about the mean of public spot traces: moving state pays if faster
steps save more seconds within this time than the move takes."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """A running pipeline: its nodes in order, the layers of each, and its times in the form of a template.

    It need not be an instance of a template. For a node that holds several spans of layers, `spans` has the largest."""

    nodes: tuple[int, ...]
    spans: tuple[LayerSpan, ...]
    times: Template


@dataclass(frozen=True, slots=True)
class NextPipelines:
    """Pipelines of a new membership. kept: numbers of the running pipelines that continue unchanged. made: pipelines of
    the other nodes; None if all of these are idle. microbatches: of each, kept ones first. tolerance: nodes that may be
    lost at once."""

    kept: tuple[int, ...]
    made: Reinstantiation | None
    microbatches: tuple[int, ...]
    seconds: float
    tolerance: int

    @property
    def moved_bytes(self) -> int:
        """Most bytes that one node sends or receives for this change."""
        return self.made.busiest_bytes if self.made else 0


@dataclass(frozen=True, slots=True, eq=False)
class PipelineChooser:
    """Choose pipelines of `templates` for one membership after another.

    If the nodes are too few for fault_tolerance + 1 pipelines, there are as many as possible. layer_bytes: as in
    `reinstantiate`. bytes_per_second: at which one node sends or receives.
    """

    templates: Mapping[int, Template]
    fault_tolerance: int
    num_microbatches: int
    layer_bytes: Sequence[int] | None = None
    bytes_per_second: float = float("inf")

    def choose(self, running: Sequence[RunningPipeline], others: Mapping[int, LayerSpan]) -> NextPipelines:
        """Return pipelines for these nodes. running: pipelines whose nodes are all present. others: the other nodes →
        the layers that each holds, (0, 0) for a new node.

        First, there are as many pipelines as the fault tolerance requires; then, as few nodes as possible are idle. A
        running pipeline is kept unless another choice's faster steps save more time than its copies take. The largest
        running pipelines are broken up first. Raises PlanError if the nodes cannot hold the model.
        """
        order = sorted(range(len(running)), key=lambda number: (len(running[number].nodes), number))
        counts = {len(order), 0, *(len(order) - (1 << power) for power in range(len(order).bit_length()))}
        found: list[NextPipelines] = []
        failure = PlanError("there are no nodes to train on")
        for count in sorted((count for count in counts if count >= 0), reverse=True):
            try:
                found.append(self._keeping(order[:count], running, others))
            except PlanError as error:
                failure = error
        if not found:
            raise failure
        return best_choice(found, self.bytes_per_second)

    def _keeping(
        self, kept: Sequence[int], running: Sequence[RunningPipeline], others: Mapping[int, LayerSpan]
    ) -> NextPipelines:
        """Return the best pipelines if exactly the `kept` ones continue unchanged."""
        instances, holders, busy, continuing = [], dict(others), 0, frozenset(kept)
        for number, one in enumerate(running):
            template = self.templates.get(len(one.nodes))
            if number in continuing:
                busy += len(one.nodes)
            elif template is not None and one.spans == node_layers(template, len(one.nodes)):
                instances.append(one.nodes)
            else:
                holders |= zip(one.nodes, one.spans)
        free = len(holders) + sum(map(len, instances))
        templates, made, total = [running[number].times for number in kept], None, self.num_microbatches
        if free:
            share = max(1, round(total * free / (free + busy)))
            made = self._made(instances, holders, len(kept), share)
            templates += [self.templates[len(nodes)] for nodes in made.pipelines] if made else []
        counts, seconds = share_microbatches(templates, max(total, len(templates)))
        tolerance = min(self.fault_tolerance, len(templates) - 1)
        return NextPipelines(tuple(kept), made, counts, seconds, tolerance)

    def _made(
        self, instances: Sequence[tuple[int, ...]], holders: Mapping[int, LayerSpan], kept: int, share: int
    ) -> Reinstantiation | None:
        """Reinstantiate with as many pipelines as the fault tolerance requires, or else as many as possible. They take
        as many nodes as possible; None if no pipeline fits beside the `kept` ones."""
        free, others = len(holders) + sum(map(len, instances)), max(0, self.fault_tolerance - kept)
        while not (used := most_nodes(self.templates, free, others + 1)) and others:
            others -= 1
        if not used and kept:
            return None
        idle = free - used if used else 0  # without any use, the error names the nodes that are needed
        while True:
            try:
                return reinstantiate(self.templates, instances, holders, others, share, self.layer_bytes, idle)
            except BatchError as error:  # smaller microbatches are always possible
                share = error.nearest[0]


class Choice(Protocol):
    """Pipelines of a membership, as `best_choice` compares them."""

    @property
    def tolerance(self) -> int: ...

    @property
    def moved_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Choice)


def best_choice(choices: Sequence[T], bytes_per_second: float) -> T:
    """Return the choice that survives the most losses and, of these, saves the most time by faster steps and moves."""
    fastest = min(one.seconds for one in choices)

    def cost(one: T) -> tuple[int, float]:
        slower = one.seconds / fastest if fastest > 0.0 else 1.0
        return -one.tolerance, one.moved_bytes / bytes_per_second + STABLE_SECONDS * slower

    return min(choices, key=cost)
