"""Whatever keeps a plan from training is found, and everything at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dilatant.config.degrees import ONE
from dilatant.cost.layer import LayerCost
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import (
    Cluster,
    InvalidPlanError,
    LayerSpec,
    Link,
    ModelSpec,
    Plan,
    Replica,
    Stage,
    UnitPlan,
    UnitSpec,
    plan_problems,
)
from dilatant.plan.validate import validate

LINK = Link(1e9)


def model(vision: int = 4, language: int = 6, *, frozen: bool = False) -> ModelSpec:
    def layers(prefix: str, count: int, trainable: bool) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(f"{prefix}{index}", "block", 10, trainable) for index in range(count))

    return ModelSpec(
        (
            UnitSpec("vision", layers("v", vision, not frozen), ("language",)),
            UnitSpec("language", layers("l", language, True)),
        )
    )


def cluster(nodes: int = 2, per_node: int = 4, size: float = 1e9) -> Cluster:
    return Cluster(nodes, per_node, size, LINK, LINK)


def example() -> Plan:
    """The plan of the worked example: two unlike replicas of each unit on five ranks."""
    return Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)), Replica((Stage(0, 4, (3,)),))), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 3, (1,)), Stage(3, 6, (2,)))), Replica((Stage(0, 6, (4,)),)))),
        )
    )


def change(unit: str, replica: int, stages: tuple[Stage, ...], plan: Plan | None = None) -> Plan:
    units = []
    for old in (plan or example()).units:
        replicas = list(old.replicas)
        if old.name == unit:
            replicas[replica] = Replica(stages)
        units.append(replace(old, replicas=tuple(replicas)))
    return Plan(tuple(units))


def test_the_worked_example_is_valid():
    validate(example(), model(), cluster())


def test_colocated_units_and_several_stages_per_rank_are_valid():
    together = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 2, (0, 1), tp=2), Stage(2, 4, (2, 3), tp=2))),), ("language",)),
            UnitPlan(
                "language",
                (Replica(tuple(Stage(i, i + 1 if i < 3 else 6, ((0, 1), (2, 3))[i % 2], tp=2) for i in range(4))),),
            ),
        )
    )
    validate(together, model(), cluster())
    by_items = tuple(replace(stage, tp=1, cp=2) for stage in together.units[0].replicas[0].stages)
    vision = replace(together.units[0], replicas=(Replica(by_items),))
    validate(Plan((vision, together.units[1])), model(), cluster())


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (change("language", 0, (Stage(0, 3, (1,)), Stage(2, 6, (2,)))), "language replica 0 holds layer l2 twice"),
        (change("language", 0, (Stage(0, 2, (1,)), Stage(4, 6, (2,)))), "language replica 0 lacks layers l2 to l3"),
        (change("vision", 1, (Stage(1, 3, (3,)),)), "vision replica 1 lacks layers v0, v3"),
        (change("vision", 0, (Stage(0, 9, (0,)),)), "holds layers 0 to 9, but vision has layers 0 to 4"),
        (change("vision", 0, (Stage(0, 4, (0,)), Stage(4, 4, (5,)))), "stage 1 holds no layer"),
        (
            change("language", 0, (Stage(3, 6, (1,)), Stage(0, 3, (2,)))),
            "the stages of language replica 0 are not in layer order",
        ),
        (
            change("language", 1, (Stage(0, 6, (2, 4), tp=2),)),
            "rank 2 is in two groups: language replica 0 stage 1 on [2] (tp 1, cp 1) and language replica 1 stage 0",
        ),
        (change("language", 1, (Stage(0, 6, (1,)),)), "ranks [1] hold two replicas of one unit"),
        (change("language", 1, (Stage(0, 6, (4, 5), tp=4),)), "tp 4 times cp 1 ranks are needed"),
        (change("language", 1, (Stage(0, 6, (4, 4), cp=2),)), "names a rank twice"),
        (
            change("language", 1, (Stage(0, 6, (4, 5, 6, 7), tp=2, cp=2, ep=3),)),
            "has ep 3; with tp 2 and cp 2 it takes ep 1, 2, 4",
        ),
        (change("language", 1, (Stage(0, 6, (8,)),)), "uses ranks [8], but the cluster has 8 devices"),
        (change("vision", 1, (Stage(0, 4, (-1,)),)), "uses ranks [-1]"),
        (Plan(example().units[1:]), "unit 'vision' of the model is not in the plan"),
        (Plan((*example().units, UnitPlan("audio", (), ()))), "unit 'audio' of the plan is not in the model"),
        (Plan((*example().units, example().units[1])), "unit 'language' is in the plan twice"),
        (Plan(example().units[::-1]), "which must come after it in the plan"),
        (
            Plan((replace(example().units[0], feeds=()), example().units[1])),
            "unit 'vision' feeds [] in the plan, ['language'] in the model",
        ),
    ],
)
def test_each_mistake_is_named(plan, complaint):
    problems = plan_problems(plan, model(), cluster())
    assert any(complaint in problem for problem in problems), problems


def test_all_mistakes_are_listed_at_once():
    plan = change("vision", 0, (Stage(0, 3, (9,)),), change("language", 0, (Stage(0, 6, (3, 4, 5, 6), tp=2, cp=2),)))
    with pytest.raises(InvalidPlanError) as raised:
        validate(plan, model(), cluster())
    text = str(raised.value)
    for part in (
        "this plan cannot train:",
        "vision replica 0 lacks layer v3",
        "uses ranks [9]",
        "rank 3 is in two groups",
        "puts tensor-parallel ranks [3, 4] on nodes [0, 1]",
    ):
        assert part in text


def test_tensor_ranks_share_a_node_but_context_ranks_need_not():
    across = change("language", 0, (Stage(0, 6, (1, 2, 5, 6), tp=2, cp=2),))
    assert not plan_problems(across, model(), cluster())
    swapped = change("language", 0, (Stage(0, 6, (1, 5, 2, 6), tp=2, cp=2),))
    assert sum("tensor-parallel" in problem for problem in plan_problems(swapped, model(), cluster())) == 2


def costs() -> CostModel:
    per_token = Quadratic(b=1.0)
    cost = LayerCost(per_token, per_token, per_token, per_token, activation_bytes=Quadratic(b=100.0))
    return CostModel("synthetic", "synthetic", "float32", {"block": {ONE: cost}})
