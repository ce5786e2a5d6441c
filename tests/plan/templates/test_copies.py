"""Copies of a layer count by the nodes that they lie on, and a search that is asked for some finds them."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from dilatant.plan.manual import plan_from_specs
from dilatant.plan.plan import ParallelSpec, Plan, Replica, Stage, UnitPlan
from dilatant.plan.templates.copies import Redundancy, copies_on_nodes, copies_on_unlike_nodes

LAYERS = {"vision": 3, "language": 6}


def survives(plan: Plan, lost: tuple[int, ...], ranks_per_node: int) -> bool:
    """Whether each layer has a replica whose stage is whole."""
    for unit in plan.units:
        for layer in range(LAYERS[unit.name]):
            stages = [s for r in unit.replicas for s in r.stages if s.first <= layer < s.end]
            if not any(all(rank // ranks_per_node not in lost for rank in s.ranks) for s in stages):
                return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_layers_survive_any_loss_of_fewer_nodes_than_copies(seed: int) -> None:
    draw = random.Random(seed)
    specs = {
        "vision": ParallelSpec(replicas=draw.choice((1, 2, 4)), pp=draw.choice((1, 2))),
        "language": ParallelSpec(replicas=draw.choice((2, 4)), pp=draw.choice((1, 2)), tp=draw.choice((1, 2))),
    }
    plan = plan_from_specs(LAYERS, specs, {"vision": ("language",), "language": ()})
    per_node = draw.choice((1, 2, 3, 4))
    nodes = range(-(-len(plan.ranks) // per_node))
    copies = min(copies_on_nodes(plan, per_node).values())
    for lost in itertools.combinations(nodes, copies - 1):
        assert survives(plan, lost, per_node)
    one_node_stages = all(len({rank // per_node for rank in placed.stage.ranks}) == 1 for placed in plan.stages())
    if one_node_stages:
        assert not all(survives(plan, lost, per_node) for lost in itertools.combinations(nodes, copies))


def test_a_copy_across_nodes_hides_none_that_lie_on_one() -> None:
    across = Replica((Stage(0, 1, (0, 2), tp=1, cp=2),))
    on_one = [Replica((Stage(0, 1, (rank,)),)) for rank in (1, 3)]
    for replicas in ([across, *on_one], [*on_one, across], [on_one[0], across, on_one[1]]):
        assert copies_on_nodes(Plan((UnitPlan("u", tuple(replicas)),)), 2) == {"u": 2}
    assert copies_on_nodes(Plan((UnitPlan("u", (across, on_one[0])),)), 2) == {"u": 1}


def test_copies_are_counted_on_nodes_of_unlike_sizes() -> None:
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, 1, (rank,)),)) for rank in range(4))),))
    assert copies_on_unlike_nodes(plan, [0, 0, 0, 1]) == {"u": 2}
    assert copies_on_unlike_nodes(plan, [0, 1, 1, 2]) == {"u": 3}


@pytest.mark.parametrize(
    ("copies", "before", "wanted", "has_sunk", "says"),
    [
        (2, 3, 2, False, ""),
        (1, 2, 2, True, "1 copy of layers of b left of the 2 that .*fault_tolerance 1 asks for; the loss of one node"),
        (2, 3, 4, True, "2 copies of layers of b left of the 4 .* the loss of 2 nodes at once may send"),
        (1, 1, 2, False, "1 copy"),  # too few, as before
        (2, 1, 3, False, "2 copies"),  # more than before
    ],
)
def test_copies_that_sink_below_what_is_wanted_are_an_event(
    copies: int, before: int, wanted: int, has_sunk: bool, says: str
) -> None:
    found = Redundancy({"a": copies + 1, "b": copies}, wanted, before)
    assert found.has_sunk is has_sunk
    assert re.match(says, found.shortage) if says else found.shortage == ""
