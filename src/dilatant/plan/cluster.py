"""The cluster: the devices that a plan may use and the links between them, in one or several homogeneous groups."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.hardware import Hardware, Link
from dilatant.cost.memory import NOTHING, MemoryReserve

__all__ = ["Cluster", "Link", "cluster_of", "cluster_of_groups"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` of `gpus_per_node` devices; rank r is on node `r // gpus_per_node`.

    `inside` is the link between two devices of a node, and of one of its NVLink domains of `domain` devices, if set;
    `between` one node's link to the others: `ports` network ports of equal bandwidth, shared evenly by its devices.
    `bytes_per_device` is the memory that a plan may use, `reserve` excluded. `parts` are the groups of a heterogeneous
    cluster, each with its `name` and `device` type; the first group has the lowest ranks and nodes. For such a cluster
    `gpus_per_node` is that of the largest node, and memory and links are the smallest of any group; `memory_bandwidth`
    is a device's, in bytes per second; use `at` for the group of one rank and `link` for the link between two ranks.
    """

    nodes: int
    gpus_per_node: int
    bytes_per_device: float
    inside: Link
    between: Link
    ports: int = 1
    reserve: MemoryReserve = NOTHING
    name: str = ""
    device: str = ""
    parts: tuple[Cluster, ...] = ()
    memory_bandwidth: float = float("inf")
    domain: int = 0

    @property
    def reach(self) -> int:
        """Devices that `inside` links to each other: those of a node, or of an NVLink domain. The nodes spread evenly
        over as few domains as hold them: 128 devices are two domains of 64, although each has 72."""
        most = max(1, self.domain // self.gpus_per_node)
        domains = -(-self.nodes // most)
        return -(-self.nodes // domains) * self.gpus_per_node

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """The homogeneous groups of devices; a homogeneous cluster is its own only group."""
        return self.parts or (self,)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each group."""
        return (0, *itertools.accumulate(group.num_devices for group in self.groups[:-1]))

    @property
    def memory(self) -> float:
        """Total bytes of a device, including the reserve."""
        return self.bytes_per_device + self.reserve.total

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts) if self.parts else self.nodes * self.gpus_per_node

    def group_of(self, rank: int) -> int:
        """Return the index of the group that contains `rank`; for ranks beyond all groups, the last group."""
        return bisect_right(self.firsts, rank) - 1

    def at(self, rank: int) -> Cluster:
        """Return the group that contains `rank`."""
        return self.parts[self.group_of(rank)] if self.parts else self

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`, or its NVLink domain where these span nodes."""
        return self.place_of(rank)[0]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the node or NVLink domain of `rank` (`node_of`) and the port there through which it sends."""
        group, before, first = self, 0, 0
        if self.parts:
            number = self.group_of(rank)
            group, first = self.parts[number], self.firsts[number]
            before = sum(-(-part.num_devices // part.reach) for part in self.parts[:number])
        node, place = divmod(rank - first, group.reach)
        return before + node, place * group.ports // group.gpus_per_node

    @property
    def port(self) -> Link:
        """The link of one network port, through which a message between nodes travels."""
        return Link(self.between.bandwidth / self.ports, self.between.latency)

    def link(self, rank: int, other: int) -> Link:
        """Return the link between two different ranks; between nodes, the slower of their two ports."""
        one, two = self.at(rank), self.at(other)
        if self.node_of(rank) == self.node_of(other):
            return one.inside.among(2)
        bandwidth = min(one.port.bandwidth, two.port.bandwidth)
        return Link(bandwidth, max(one.port.latency, two.port.latency))

    def bytes_of(self, ranks: Iterable[int]) -> NDArray[np.float64]:
        """Return the memory in bytes that a plan may use on each of these ranks: [ranks]."""
        return np.array([self.at(rank).bytes_per_device for rank in ranks], dtype=np.float64)

    def overflow(self, ranks: Sequence[int], peak_bytes: Sequence[float]) -> float:
        """Return the largest excess in bytes of a rank's peak over its usable memory; at most 0 if all ranks fit."""
        return float(np.max(np.asarray(peak_bytes) - self.bytes_of(ranks), initial=-np.inf)) if peak_bytes else 0.0


def cluster_of(
    hardware: Hardware, nodes: int, gpus_per_node: int, reserve: MemoryReserve = NOTHING, name: str = ""
) -> Cluster:
    """Return `nodes` nodes of `gpus_per_node` devices each, of whose memory plans leave `reserve` free."""
    links = hardware.inside, hardware.between, hardware.ports
    memory = hardware.memory - reserve.total
    device, speed = hardware.name if name else "", hardware.bandwidth * hardware.memory_efficiency
    return Cluster(nodes, gpus_per_node, memory, *links, reserve, name, device, (), speed, hardware.domain)


def cluster_of_groups(groups: Sequence[Cluster]) -> Cluster:
    """Combine groups into one cluster; a single group is returned unchanged."""
    if len(groups) == 1:
        return groups[0]
    smallest = min(groups, key=lambda group: group.bytes_per_device)
    inside, port = (
        Link(
            min(getattr(group, name).bandwidth for group in groups),
            max(getattr(group, name).latency for group in groups),
        )
        for name in ("inside", "port")
    )
    return Cluster(
        nodes=sum(group.nodes for group in groups),
        gpus_per_node=max(group.gpus_per_node for group in groups),
        bytes_per_device=smallest.bytes_per_device,
        inside=inside,
        between=port,
        reserve=smallest.reserve,
        parts=tuple(groups),
    )
