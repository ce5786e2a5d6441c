"""The devices a plan may use and the links between them: one group of equal devices, or several that are unlike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.hardware import Hardware, Link
from dilatant.cost.memory import NOTHING, MemoryReserve

__all__ = ["Cluster", "Link", "cluster_of", "cluster_of_groups"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` of `gpus_per_node` devices; rank r sits on node `r // gpus_per_node`.

    `inside` links two devices of a node, `between` is one node's way to the others: that of `ports` network ports of
    equal bandwidth, which its devices share evenly. `bytes_per_device` are those that a plan may use, beside `reserve`.

    `parts` are the groups of a cluster of unlike devices, each with its `name` and what its `device` is; the first has
    the first ranks and nodes. Of such a cluster `gpus_per_node` are those of its largest node, and memory and links
    the least of any group: what is asked of one rank (`at`) or of two (`link`) is of their groups.
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

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """Each of equal devices; a cluster of equal devices is one."""
        return self.parts or (self,)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank of each group."""
        firsts = [0]
        for group in self.groups[:-1]:
            firsts.append(firsts[-1] + group.num_devices)
        return tuple(firsts)

    @property
    def memory(self) -> float:
        """All bytes of a device."""
        return self.bytes_per_device + self.reserve.total

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts) if self.parts else self.nodes * self.gpus_per_node

    def group_of(self, rank: int) -> int:
        """The number of the group that `rank` is in; of one beyond all, the last."""
        end = 0
        for group, part in enumerate(self.parts):
            end += part.num_devices
            if rank < end:
                return group
        return max(0, len(self.parts) - 1)

    def at(self, rank: int) -> Cluster:
        """The group that `rank` is in."""
        return self.parts[self.group_of(rank)] if self.parts else self

    def node_of(self, rank: int) -> int:
        """The node on which `rank` sits."""
        return self.place_of(rank)[0]

    def port_of(self, rank: int) -> int:
        """The port of its node through which `rank` sends."""
        return self.place_of(rank)[1]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The node on which `rank` sits, and the port of that through which it sends."""
        number = self.group_of(rank)
        group, before = self.groups[number], self.parts[:number]
        node, place = divmod(rank - sum(part.num_devices for part in before), group.gpus_per_node)
        return sum(part.nodes for part in before) + node, place * group.ports // group.gpus_per_node

    @property
    def port(self) -> Link:
        """One port: what a message between nodes travels through."""
        return Link(self.between.bandwidth / self.ports, self.between.latency)

    def link(self, rank: int, other: int) -> Link:
        """The link between two different ranks: between nodes, of their two ports the slower."""
        one, two = self.at(rank), self.at(other)
        if self.node_of(rank) == self.node_of(other):
            return one.inside
        bandwidth = min(one.port.bandwidth, two.port.bandwidth)
        return Link(bandwidth, max(one.port.latency, two.port.latency))

    def bytes_of(self, ranks: Iterable[int]) -> NDArray[np.float64]:
        """What a plan may use of the memory of each of these: [ranks]."""
        return np.array([self.at(rank).bytes_per_device for rank in ranks], dtype=np.float64)

    def overflow(self, ranks: Sequence[int], peak_bytes: Sequence[float]) -> float:
        """The most bytes by which the peak of any of these ranks is above what it may use; not above 0 if all fit."""
        return (
            float(np.max(np.asarray(peak_bytes) - self.bytes_of(ranks), initial=-np.inf))
            if peak_bytes
            else 0.0
        )

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Cluster:
        """Read what `dataclasses.asdict` made of one. Raises KeyError or TypeError for something else."""
        return cls(
            **{
                **document,
                **{name: Link(**document[name]) for name in ("inside", "between")},
                "reserve": MemoryReserve(**document.get("reserve", {})),
                "parts": tuple(cls.from_document(part) for part in document.get("parts", ())),
            }
        )


def cluster_of(
    hardware: Hardware, nodes: int, gpus_per_node: int, reserve: MemoryReserve = NOTHING, name: str = ""
) -> Cluster:
    """`nodes` nodes of `gpus_per_node` such devices, of whose memory plans leave `reserve` free."""
    links = hardware.inside, hardware.between, hardware.ports
    memory = hardware.memory - reserve.total
    return Cluster(nodes, gpus_per_node, memory, *links, reserve, name, hardware.name if name else "")


def cluster_of_groups(groups: Sequence[Cluster]) -> Cluster:
    """All groups together; a single one is a cluster of its own."""
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
