"""The devices a plan may use and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.cost.hardware import Hardware, Link
from dilatant.cost.memory import NOTHING, MemoryReserve

__all__ = ["Cluster", "Link", "cluster_of"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` of `gpus_per_node` devices; rank r sits on node `r // gpus_per_node`.

    `inside` links two devices of a node, `between` is one node's way to the others: that of `ports` network ports of
    equal bandwidth, which its devices share evenly. `bytes_per_device` are those that a plan may use, beside `reserve`.
    """

    nodes: int
    gpus_per_node: int
    bytes_per_device: float
    inside: Link
    between: Link
    ports: int = 1
    reserve: MemoryReserve = NOTHING

    @property
    def memory(self) -> float:
        """All bytes of a device."""
        return self.bytes_per_device + self.reserve.total

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node on which `rank` sits."""
        return rank // self.gpus_per_node

    def port_of(self, rank: int) -> int:
        """The port of its node through which `rank` sends."""
        return rank % self.gpus_per_node * self.ports // self.gpus_per_node

    @property
    def port(self) -> Link:
        """One port: what a message between nodes travels through."""
        return Link(self.between.bandwidth / self.ports, self.between.latency)

    def link(self, rank: int, other: int) -> Link:
        """The link between two different ranks."""
        return self.inside if self.node_of(rank) == self.node_of(other) else self.port


def cluster_of(
    hardware: Hardware, nodes: int, gpus_per_node: int, reserve: MemoryReserve = NOTHING
) -> Cluster:
    """`nodes` nodes of `gpus_per_node` such devices, of whose memory plans leave `reserve` free."""
    links = hardware.inside, hardware.between, hardware.ports
    return Cluster(nodes, gpus_per_node, hardware.memory - reserve.total, *links, reserve)
