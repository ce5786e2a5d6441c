"""Redundancy of layers: the number of copies on disjoint nodes, which decides how many nodes may be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Redundancy:
    """Copies of layers on different nodes. by_unit: as in `copies_on_unlike_nodes`. wanted: of every layer. before: of
    the scarcest layer, before the last change of members."""

    by_unit: Mapping[str, int]
    wanted: int
    before: int

    @property
    def fewest(self) -> int:
        return min(self.by_unit.values())

    @property
    def has_sunk(self) -> bool:
        """True if the last change of members made too few copies, or still fewer."""
        return self.fewest < min(self.wanted, self.before)

    @property
    def shortage(self) -> str:
        """Return what is missing, and what the next loss may do; empty if nothing is missing."""
        count = self.fewest
        if count >= self.wanted:
            return ""
        units = " and ".join(name for name, copies in self.by_unit.items() if copies == count)
        copies, nodes = ("1 copy", "one node") if count == 1 else (f"{count} copies", f"{count} nodes at once")
        return (
            f"{copies} of layers of {units} left of the {self.wanted} that resilience.fault_tolerance "
            f"{self.wanted - 1} asks for; the loss of {nodes} may send the run back to its newest checkpoint"
        )


def copies_on_nodes(plan: Plan, ranks_per_node: int) -> dict[str, int]:
    """Return `copies_on_unlike_nodes` for ranks that are assigned to equal nodes in order."""
    return copies_on_unlike_nodes(plan, [rank // ranks_per_node for rank in range(plan.ranks[-1] + 1)])


def copies_on_unlike_nodes(plan: Plan, node_of: Sequence[int]) -> dict[str, int]:
    """Return unit → copies of its scarcest layer that share no node; losing one node fewer loses no layer of the unit.

    node_of: rank → node. A copy whose stage spans several nodes is lost with any of them.
    """
    return {
        unit.name: min(
            disjoint(
                [
                    frozenset(node_of[rank] for rank in stage.ranks)
                    for replica in unit.replicas
                    for stage in replica.stages
                    if stage.first <= layer < stage.end
                ]
            )
            for layer in range(unit.replicas[0].stages[-1].end)
        )
        for unit in plan.units
    }


def disjoint(places: list[frozenset[int]]) -> int:
    """Return how many of these node sets are disjoint, found greedily, smallest first."""
    taken: set[int] = set()
    count = 0
    for nodes in sorted(places, key=len):
        if not nodes & taken:
            taken |= nodes
            count += 1
    return count
