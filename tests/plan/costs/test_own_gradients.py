"""What sums of gradients hold beside them, and what salvage keeps, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilatant.config.degrees import Degrees
from dilatant.cost.layer import LayerCost
from dilatant.cost.memory import FP32
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan

WHOLE, PARTS = (Stage(0, 4, (0,)),), (Stage(0, 2, (0,)), Stage(2, 4, (1,)))
LAYERS = (
    LayerSpec("embedding", "any", 100, largest=100),
    LayerSpec("block", "any", 50, largest=20, divided=False),
    LayerSpec("frozen", "any", 40, largest=40, trainable=False),
    LayerSpec("head", "any", 110, largest=100, tied=100),
)


@pytest.mark.parametrize(
    ("replicas", "zero", "kept"),
    [
        ([WHOLE], "none", [0]),  # nobody else has any
        ([PARTS], "none", [100, 100]),  # the tied weight
        ([WHOLE, (Stage(0, 4, (1,)),)], "none", [160, 160]),
        ([WHOLE, (Stage(0, 4, (1,)),)], "all", [260, 260]),  # with the largest once more
        ([PARTS, (Stage(0, 4, (2,)),)], "none", [150, 110, 160]),
        ([(Stage(0, 4, (0, 1), 2),)], "none", [50]),  # the block, which tp does not divide
        ([(Stage(0, 4, (0, 1), 1, 2),)], "none", [160]),
    ],
)
def test_gradients_summed_with_other_ranks_are_kept_once_more(replicas, zero, kept) -> None:
    cost = LayerCost(*[Quadratic()] * 4)
    costs = CostModel(
        "any", "synthetic", "float32", {"any": dict.fromkeys([Degrees(), Degrees(2), Degrees(cp=2)], cost)}
    )
    plan = Plan((UnitPlan("language", tuple(map(Replica, replicas)), ()),))
    model = ModelSpec((UnitSpec("language", LAYERS, ()),))
    rules = replace(FP32, zero=zero)
    assert not stage_costs(plan, model, costs, rules).own_gradient_bytes.any()
    found = stage_costs(plan, model, costs, replace(rules, keeps_gradients=True))
    assert found.own_gradient_bytes.tolist() == [4 * count for count in kept]
    document = StepCosts(found).to_document()
    assert StepCosts.from_document(document, plan).stages.own_gradient_bytes.tolist() == [4 * count for count in kept]


@pytest.mark.parametrize(
    ("ranks", "replicas", "summed"),
    [
        (Degrees(), 1, 0),
        (Degrees(), 2, 600),  # all experts' part of one weight
        (Degrees(ep=2), 1, 40),  # nobody else has these experts
        (Degrees(ep=2), 2, 300),
        (Degrees(cp=4, ep=2), 1, 300),
        (Degrees(tp=2), 2, 300),
    ],
)
def test_a_rank_sums_its_part_of_the_experts(ranks, replicas, summed) -> None:
    layer = LayerSpec("block", "any", 1000, experts=4, expert_parameters=900, largest=40, largest_of_experts=600)
    costs = CostModel(
        "any", "synthetic", "float32", {"any": dict.fromkeys([ranks.without_experts], LayerCost(*[Quadratic()] * 4))}
    )
    count = ranks.ranks
    stages = [Stage(0, 1, tuple(range(first, first + count)), *ranks) for first in range(0, replicas * count, count)]
    plan = Plan((UnitPlan("language", tuple(Replica((stage,)) for stage in stages), ()),))
    model = ModelSpec((UnitSpec("language", (layer,), ()),))
    found = stage_costs(plan, model, costs, replace(FP32, zero="none"))
    assert found.sum_bytes.tolist() == [4 * summed] * replicas
