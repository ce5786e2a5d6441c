"""The search tries groups of ranks on several nodes that divide experts; of a small case no plan is faster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from cases.model_cases import cluster, cost_model
from cases.search_cases import search
from dilatant.config.degrees import Degrees
from dilatant.cost.layer import LayerCost, with_experts_on_ranks
from dilatant.cost.memory import ParameterBytes
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import Workload
from dilatant.plan.costs.unit_layers import WIDEST_EXPERTS, UnitLayers
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.assignment.step_assignment import Microbatching, assign
from dilatant.schedule.plan_scorer import PlanSimulator

RULES = ParameterBytes(1.0, 1.0, 2.0)
BATCH, SIZES = 8, (1, 2)


def _model(layers: int, experts: int = 4) -> ModelSpec:
    one = LayerSpec("language.0", "language", 10_000, experts=experts, expert_parameters=8_000)
    return ModelSpec((UnitSpec("language", tuple(replace(one, name=f"language.{k}") for k in range(layers))),))


def _costs(exchange: float):
    plain = cost_model({"language": 1.0}, degrees=((1, 1),))
    one = replace(plain.layers["language"][Degrees()], expert_exchange=Quadratic(b=exchange))
    return replace(plain, layers={"language": {Degrees(): one}})


def _every_plan(layers: int, devices: int):
    """Every plan of equal pipelines, and numbers of microbatches: of the sizes in each group, or in all of them."""
    for depth, ep, replicas in itertools.product(range(1, layers + 1), (1, 2, 4), range(1, devices + 1)):
        if depth * ep * replicas > devices:
            continue
        for rest in itertools.combinations(range(1, layers), depth - 1):
            borders = (0, *rest, layers)
            for by_stage in (False, True):
                places = [(r, s) for r in range(replicas) for s in range(depth)]
                order = {place: k for k, place in enumerate(sorted(places, key=lambda p: p[::-1] if by_stage else p))}

                def stage(r: int, s: int, order=order, borders=borders, ep=ep) -> Stage:
                    first = order[r, s] * ep
                    return Stage(borders[s], borders[s + 1], tuple(range(first, first + ep)), ep=ep)

                chains = tuple(Replica(tuple(stage(r, s) for s in range(depth))) for r in range(replicas))
                for size in {*SIZES, *(size * ep for size in SIZES)}:
                    if BATCH % (replicas * size) == 0:
                        yield Plan((UnitPlan("language", chains),)), BATCH // (replicas * size)


# Layers, memory, and the ep of the fastest plan: with little memory it divides experts among all ranks.
CASES = {(1, 22e3): 4, (2, 40e3): 4, (3, 60e3): 4, (1, 30e3): 2, (2, 30e3): 2, (3, 1e9): 1}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("exchange", [1e-3, 0.02])
def test_no_plan_of_equal_pipelines_is_faster(case: tuple[int, float], exchange: float) -> None:
    layers, capacity = case
    machine, spec, costs = cluster(2, 2, capacity), _model(layers), _costs(exchange)
    tokens = np.random.default_rng(layers).integers(1, 12, BATCH).astype(float)
    workload = Workload({"language": tokens})
    scorer = PlanSimulator(spec, costs, machine, workload, BATCH, rules=RULES)
    fitting = []
    for plan, count in _every_plan(layers, 4):
        score = scorer(plan, count)
        if machine.overflow(plan.ranks, score.peak_bytes) <= 0.0:
            fitting.append((score.seconds, max(stage.stage.ep for stage in plan.stages())))
    best, ep = min(fitting)
    if exchange == 1e-3:
        assert ep == CASES[case]
    found = search(spec, costs, machine, workload, BATCH, scorer, SIZES, RULES)
    assert found.seconds <= best * (1 + 1e-3)  # rank orders differ by latencies of microseconds


def test_tokens_of_a_node_travel_while_others_leave_it() -> None:
    """Of 8 ranks on 2 nodes, 3 others of a rank's are near and 4 far; of 4 on one node all are near."""
    one = Quadratic(b=1.0)
    cost = LayerCost(one, one, one, one, expert_exchange=Quadratic(b=0.8, c=0.1))

    def sent(*where) -> Quadratic:
        return with_experts_on_ranks(cost, *where).forward

    assert sent(4) == Quadratic(b=1.0 + 0.8 * 3 / 4, c=0.1)
    assert sent(8, 4, (1.0, 5.0)) == Quadratic(b=1.0 + 0.8 * 4 / 8, c=0.5)
    assert sent(8, 4, (10.0, 5.0)) == Quadratic(b=1.0 + 0.8 * 10 * 4 / 8, c=0.5)


def test_groups_on_several_nodes_are_whole_nodes_and_divide_the_experts() -> None:
    units = UnitLayers(_model(1, 192), _costs(0.1), Workload({"language": np.ones(2)}), 8, RULES, slower=(8.0, 3.0))
    assert [one.ep for one in units.with_experts("language", Degrees())] == [1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64]
    assert WIDEST_EXPERTS == 64
    assert units.groups(["language"])[-1] == 64
    alone = replace(units, slower=None)
    assert max(one.ep for one in alone.with_experts("language", Degrees())) == 8


@pytest.mark.parametrize(("tokens", "count"), [(8.0, 1), (17.0, 2)])
def test_each_group_has_a_row(tokens: float, count: int) -> None:
    """Eight samples of 8 tokens fit four rows of 20 tokens, of 17 twice as many."""
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0, 1, 2, 3), ep=4),)),)),))
    samples = np.full(8, tokens)
    made = assign(plan, {"language": samples}, Microbatching(1, row_tokens=20), tokens=samples)
    assert len(made.microbatches["language"][0]) == count
