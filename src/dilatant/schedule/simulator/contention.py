"""Link contention: travel time of messages that share ports, each port a queue ordered by when messages are ready.

A rank has a link in and out inside its node, and shares its node's ports with neighbouring ranks. A message arrives
when the last of its links has passed its part, so it is never faster than alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.cluster import Cluster
from dilatant.schedule.packed import FORWARD, PlanArrays
from dilatant.schedule.simulator.graph import ScheduleGraph


def travel(
    graph: ScheduleGraph, seconds: NDArray[np.float64], size: NDArray[np.float64], cluster: Cluster
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when every op ends [ops], and the seconds from then to the arrival of each of its messages [messages]. The
    ops of the step take `seconds` [ops]. `size` is each message's bytes on one rank of the stage that makes its rows.

    Messages take no time between stages with the same ranks and degrees. Otherwise the ranks of both stages send and
    receive equal parts; tensor-parallel ranks then all-gather theirs. If the same ranks hold both stages with different
    degrees, only the parts that move to another rank travel, unless the ranks all-gather. With heterogeneous devices
    every port has its own bandwidth, and the slower one decides the arrival.
    """
    from dilatant.schedule.simulator import graph_kernels as kernels

    placed = graph.arrays.placed
    source, target = graph.messages
    pairs, pair = np.unique(graph.stage[source] * np.int64(len(placed)) + graph.stage[target], return_inverse=True)
    ways = _ways(graph.arrays, tuple(pairs.tolist()), cluster)
    tp, parts, latency, bandwidth = _stages(graph.arrays, cluster)
    maker = np.where(graph.kind[source] == FORWARD, graph.stage[source], graph.stage[target])
    taker = graph.stage[target]
    whole = size * parts[maker]
    gathered = whole / parts[taker] * (1 - 1 / tp[taker]) / bandwidth[taker]
    swapped = np.where(ways.swaps[pair], whole / parts[taker] * (1 - 1 / parts[taker]) / bandwidth[taker], 0.0)
    rest = ways.latency[pair] + np.where(tp[taker] > 1, latency[taker] + gathered, swapped)
    stays = ~ways.moves[pair] | (size == 0)
    # By source, then by target: the order in which messages are sent.
    by_target = kernels.group_by_target(graph.edge_target, graph.num_ops)[1]
    offsets, edges = kernels.group_by_target(graph.edge_source[by_target], graph.num_ops)
    ends, lag = kernels.port_contention(
        graph.list_offsets, offsets, by_target[edges], graph.edge_target, seconds, np.where(stays, 0.0, whole),
        np.where(stays, 0.0, rest), pair, ways.offsets, ways.way, ways.load, ways.count,
    )  # fmt: skip
    return ends, lag


@lru_cache(maxsize=1)  # many schedules share one plan
def _stages(arrays: PlanArrays, cluster: Cluster) -> tuple[NDArray[np.float64], ...]:
    """Return each stage's tp and parts of a row, and latency and bandwidth inside its node, [stages] each."""
    links = [cluster.at(entry.stage.ranks[0]).inside.among(entry.stage.tp) for entry in arrays.placed]
    own = [
        (entry.stage.tp, entry.stage.degrees.row_parts, link.latency, link.bandwidth)
        for entry, link in zip(arrays.placed, links, strict=True)
    ]
    return tuple(np.asarray(own, dtype=np.float64).reshape(-1, 4).T)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Links that messages between pairs of stages use: pair p takes the links `way[offsets[p]:offsets[p + 1]]`, each
    for `load` seconds per byte of the whole message. `moves`, `swaps` (same ranks, other degrees) and `latency` are
    [pairs]."""

    offsets: NDArray[np.int64]
    way: NDArray[np.int64]
    load: NDArray[np.float64]
    count: int
    moves: NDArray[np.bool_]
    swaps: NDArray[np.bool_]
    latency: NDArray[np.float64]


@lru_cache(maxsize=1)  # the families of a plan send between the same stages
def _ways(arrays: PlanArrays, pairs: tuple[int, ...], cluster: Cluster) -> _Ways:
    """Number the links: out of each rank inside its node, in, out of each port, in. `pairs` = source * stages +
    target."""
    placed = arrays.placed
    source, target = np.divmod(np.asarray(pairs, dtype=np.int64), max(len(placed), 1))
    ends = _ends_of(tuple(rank for entry in placed for rank in entry.stage.ranks), cluster)
    widths = np.asarray([len(entry.stage.ranks) for entry in placed])
    firsts = np.cumsum(widths) - widths
    parcels = np.maximum(widths[source], widths[target])
    pair = np.repeat(np.arange(len(source)), parcels)
    nth = np.arange(len(pair)) - np.repeat(np.cumsum(parcels) - parcels, parcels)
    sender, receiver = (firsts[end][pair] + nth * widths[end][pair] // parcels[pair] for end in (source, target))
    crosses = (ends.node[sender] != ends.node[receiver]).astype(np.int64)
    devices, ports = int(ends.rank.max()) + 1, int(ends.port.max()) + 1
    out = np.where(crosses, 2 * devices + ends.port[sender], ends.rank[sender])
    into = np.where(crosses, 2 * devices + ports + ends.port[receiver], devices + ends.rank[receiver])
    moves = ends.rank[sender] != ends.rank[receiver]
    loads = [np.where(moves, 1 / ends.bandwidth[crosses, end] / parcels[pair], 0.0) for end in (sender, receiver)]
    count = 2 * (devices + ports)
    codes, at = np.unique(np.concatenate([pair * count + out, pair * count + into]), return_inverse=True)
    ends_of_pair = [(placed[a].stage, placed[b].stage) for a, b in zip(source, target)]
    same = np.asarray([one.ranks == other.ranks for one, other in ends_of_pair], dtype=bool)
    alike = np.asarray([one.degrees.axes == other.degrees.axes for one, other in ends_of_pair], dtype=bool)
    latency = np.zeros(len(source))
    np.maximum.at(latency, pair, np.maximum(ends.latency[crosses, sender], ends.latency[crosses, receiver]))
    return _Ways(
        np.searchsorted(codes, np.arange(len(source) + 1) * count),
        codes % count,
        np.bincount(at, np.concatenate(loads), len(codes)).astype(np.float64),
        count,
        ~(same & alike),
        same & ~alike,
        latency,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """Ranks' indices in the plan, nodes and ports, [ranks]; bandwidth and latency in the node and of the port, [2,
    ranks]."""

    rank: NDArray[np.int64]
    node: NDArray[np.int64]
    port: NDArray[np.int64]
    bandwidth: NDArray[np.float64]
    latency: NDArray[np.float64]


@lru_cache(maxsize=2)
def _ends_of(ranks: tuple[int, ...], cluster: Cluster) -> _Ends:
    """Return the endpoints of `ranks`, which are the same for every schedule and batch of a plan."""
    own, rank = np.unique(np.asarray(ranks, dtype=np.int64), return_inverse=True)
    groups = [cluster.at(one) for one in own.tolist()]
    node, port = np.asarray([cluster.place_of(one) for one in own.tolist()]).T
    port = np.unique(node * (int(port.max()) + 1) + port, return_inverse=True)[1]
    links = [[group.inside.among(2) for group in groups], [group.port for group in groups]]
    bandwidth, latency = (
        np.asarray([[getattr(link, name) for link in row] for row in links])[:, rank]
        for name in ("bandwidth", "latency")
    )
    return _Ends(rank, node[rank], port[rank], bandwidth, latency)
