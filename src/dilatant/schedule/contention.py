"""How long messages travel where several share a port: each passes bytes in the order in which they are ready.

A rank has a way in and out inside its node, and shares its node's ports with the ranks beside it. A message is there
when the last of the ways it takes has passed its part; so it is never quicker than alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.cluster import Cluster
from dilatant.plan.plan import PlacedStage
from dilatant.schedule.graph import ScheduleGraph
from dilatant.schedule.packed import FORWARD


def travel(
    graph: ScheduleGraph, seconds: NDArray[np.float64], size: NDArray[np.float64], cluster: Cluster
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(when every op ends [ops], the seconds from there until each of its messages arrives [messages]) of a step whose
    ops take `seconds` [ops]; zero between stages on the same ranks. size: bytes that a rank of the stage which makes
    the rows has of each message.

    The ranks of both stages send and receive equal shares of it; tensor-parallel ranks then gather theirs.
    """
    from dilatant.schedule import graph_kernels as kernels

    count = graph.num_messages
    placed = graph.arrays.placed
    source, target = graph.edge_source[:count], graph.edge_target[:count]
    pairs, pair = np.unique(
        graph.stage[source] * np.int64(len(placed)) + graph.stage[target], return_inverse=True
    )
    ways = _ways(placed, pairs // len(placed), pairs % len(placed), cluster)
    tp, cp = (np.asarray([getattr(entry.stage, name) for entry in placed]) for name in ("tp", "cp"))
    maker = np.where(graph.kind[source] == FORWARD, graph.stage[source], graph.stage[target])
    taker = graph.stage[target]
    whole = size * cp[maker]
    gathered = whole / cp[taker] * (1 - 1 / tp[taker]) / cluster.inside.bandwidth
    rest = ways.latency[pair] + np.where(tp[taker] > 1, cluster.inside.latency + gathered, 0.0)
    stays = ~ways.moves[pair] | (size == 0)
    # By source, and of one source by target: the order in which they are sent.
    by_target = kernels.group_by_target(graph.edge_target, graph.num_ops)[1]
    offsets, edges = kernels.group_by_target(graph.edge_source[by_target], graph.num_ops)
    ends, lag = kernels.port_contention(
        graph.list_offsets, offsets, by_target[edges], graph.edge_target, seconds, np.where(stays, 0.0, whole),
        np.where(stays, 0.0, rest), pair, ways.offsets, ways.way, ways.load, ways.count,
    )  # fmt: skip
    return ends, lag


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """What messages between pairs of stages pass through: of pair p the ways `way[offsets[p]:offsets[p + 1]]`, for
    `load` seconds per byte of the whole message. moves, latency: [pairs]."""

    offsets: NDArray[np.int64]
    way: NDArray[np.int64]
    load: NDArray[np.float64]
    count: int
    moves: NDArray[np.bool_]
    latency: NDArray[np.float64]


def _ways(
    placed: tuple[PlacedStage, ...], source: NDArray[np.int64], target: NDArray[np.int64], cluster: Cluster
) -> _Ways:
    """Ways in order: out of each rank inside its node, in, out of each port, in."""
    widths = np.asarray([len(entry.stage.ranks) for entry in placed])
    ranks = np.concatenate([entry.stage.ranks for entry in placed]).astype(np.int64)
    firsts = np.cumsum(widths) - widths
    parcels = np.maximum(widths[source], widths[target])
    pair = np.repeat(np.arange(len(source)), parcels)
    nth = np.arange(len(pair)) - np.repeat(np.cumsum(parcels) - parcels, parcels)
    sender, receiver = (
        ranks[firsts[end][pair] + nth * widths[end][pair] // parcels[pair]] for end in (source, target)
    )
    devices, gpus = cluster.num_devices, cluster.gpus_per_node
    crosses = sender // gpus != receiver // gpus
    port_of_sender, port_of_receiver = (
        rank // gpus * cluster.ports + rank % gpus * cluster.ports // gpus for rank in (sender, receiver)
    )
    ports = cluster.nodes * cluster.ports
    out = np.where(crosses, 2 * devices + port_of_sender, sender)
    into = np.where(crosses, 2 * devices + ports + port_of_receiver, devices + receiver)
    load = np.where(crosses, 1 / cluster.port.bandwidth, 1 / cluster.inside.bandwidth) / parcels[pair]
    load = np.where(sender == receiver, 0.0, load)
    count = 2 * (devices + ports)
    codes, at = np.unique(np.concatenate([pair * count + out, pair * count + into]), return_inverse=True)
    same = np.asarray([placed[a].stage.ranks == placed[b].stage.ranks for a, b in zip(source, target)])
    latency = np.zeros(len(source))
    np.maximum.at(latency, pair, np.where(crosses, cluster.port.latency, cluster.inside.latency))
    return _Ways(
        np.searchsorted(codes, np.arange(len(source) + 1) * count),
        codes % count,
        np.bincount(at, np.concatenate([load, load]), len(codes)).astype(np.float64),
        count,
        ~same.astype(bool),
        latency,
    )
