"""How many nodes may be lost before a layer is: its copies are worth what they lie on."""

from __future__ import annotations

from dilatant.plan.plan import Plan


def copies_on_nodes(plan: Plan, ranks_per_node: int) -> dict[str, int]:
    """Unit → copies of its scarcest layer that share no node, so that losing one node fewer loses none of its layers.

    Ranks lie on nodes in order. A copy whose stage lies on several nodes is lost with any of them.
    """
    return {
        unit.name: min(
            _disjoint(
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


def _disjoint(places: list[frozenset[int]]) -> int:
    """Of sets of nodes, as many as share none; the small ones are taken first."""
    taken: set[int] = set()
    count = 0
    for nodes in sorted(places, key=len):
        if not nodes & taken:
            taken |= nodes
            count += 1
    return count
