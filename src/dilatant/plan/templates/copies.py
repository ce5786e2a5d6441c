"""Redundancy of layers: the number of copies on disjoint nodes, which decides how many nodes may be lost."""

from __future__ import annotations

from dilatant.plan.plan import Plan


def copies_on_nodes(plan: Plan, ranks_per_node: int) -> dict[str, int]:
    """Return unit → copies of its scarcest layer that share no node; losing one node fewer loses no layer of the unit.

    Ranks are assigned to nodes in order. A copy whose stage spans several nodes is lost with any of them.
    """
    return {
        unit.name: min(
            disjoint(
                [
                    frozenset(rank // ranks_per_node for rank in stage.ranks)
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
