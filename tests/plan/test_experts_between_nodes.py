"""The search tries groups of ranks on several nodes that divide experts; none of all plans of a small case is faster."""

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
from dilatant.plan.rank_mapping import RankOrder
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


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_equal_pipelines_is_faster(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, machine = int(draw.integers(1, 4)), cluster(2, 2, float(draw.choice([9e3, 14e3, 2e4, 3e4, 1e9])) * 1.5)
    spec, costs = _model(layers), _costs(float(draw.choice([1e-3, 0.02, 0.1])))
    workload = Workload({"language": draw.integers(1, 12, BATCH).astype(float)})
    scorer = PlanSimulator(spec, costs, machine, workload, BATCH, rules=RULES)
    fitting = []
    for plan, count in _every_plan(layers, 4):
        score = scorer(plan, count)
        if machine.overflow(plan.ranks, score.peak_bytes) <= 0.0:
            fitting.append((score.seconds, max(stage.stage.ep for stage in plan.stages())))
    if not fitting:
        pytest.skip("no plan fits")
    found = search(spec, costs, machine, workload, BATCH, scorer, SIZES, RULES)
    assert found.seconds <= min(fitting)[0] * (1 + 1e-9)
