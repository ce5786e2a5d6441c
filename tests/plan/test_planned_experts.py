"""Plans divide experts among ranks where that pays, and count what it saves and what it takes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from cases.model_cases import cluster, cost_model
from cases.search_cases import find, search
from dilatant.config.degrees import Degrees
from dilatant.cost.layer import LayerCost, with_experts_on_ranks
from dilatant.cost.memory import ParameterBytes
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import Cluster, Link, Workload
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.sync_time import sharing, sync_seconds
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.layouts.option_table import OptionTable
from dilatant.plan.layouts.space import Space
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec, roles_of
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.search.shapes import shapes
from dilatant.schedule.families.families import one_f_one_b
from dilatant.schedule.plan_scorer import PlanSimulator
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.predict import predict

MIXTURE = LayerSpec("language.0", "language", 10_000, experts=4, expert_parameters=8_000)
MODEL = ModelSpec((UnitSpec("language", (MIXTURE,)),))
RULES = ParameterBytes(1.0, 1.0, 2.0, "all")


def _costs(exchange: float = 0.0):
    plain = cost_model({"language": 1.0}, degrees=((1, 1), (1, 2), (2, 1), (2, 2), (1, 4)))
    layers = {
        degree: replace(cost, expert_exchange=Quadratic(b=exchange))
        for degree, cost in plain.layers["language"].items()
    }
    return replace(plain, layers={"language": layers})


def _without_tp(exchange: float):
    every = _costs(exchange)
    few = {degrees: every.layers["language"][degrees] for degrees in (Degrees(), Degrees(cp=2))}
    return replace(every, layers={"language": few})


def _plan(*stages: Stage) -> Plan:
    return Plan((UnitPlan("language", tuple(Replica((stage,)) for stage in stages)),))


def test_a_rank_holds_its_experts_and_shards_state_with_copies() -> None:
    plan = _plan(Stage(0, 1, (0, 1, 2, 3), tp=2, cp=2, ep=4), Stage(0, 1, (4,)))
    wide, alone = sharing(plan, MODEL, RULES)
    # Of 1000 numbers beside experts three ranks have each, of 2000 of experts two.
    assert wide[0] == pytest.approx(3000 / (1000 / 3 + 2000 / 2))
    assert alone[0] == pytest.approx(10_000 / (2000 / 3 + 8000 / 2))
    static = stage_costs(plan, MODEL, _costs(), RULES).static_bytes
    np.testing.assert_allclose(static[0], 2 * 3000 + 2 * (1000 / 3 + 2000 / 2))


def test_expert_gradients_are_summed_among_holders_of_the_same() -> None:
    machine = Cluster(1, 8, 1e12, Link(1.0), Link(1.0), 8)
    apart = sync_seconds(_plan(Stage(0, 1, (0, 1), cp=2, ep=2)), MODEL, machine, RULES)
    assert apart.beside == {0: 2000 / 2, 1: 2000 / 2}
    assert apart.after == apart.beside
    two = sync_seconds(_plan(Stage(0, 1, (0, 1), cp=2, ep=2), Stage(0, 1, (2, 3), cp=2, ep=2)), MODEL, machine, RULES)
    assert two.of(0) == pytest.approx(2 * 3 / 4 * 2000 + 2 * 1 / 2 * 4000)


def test_tokens_pay_for_their_way_once_a_pass() -> None:
    one = Quadratic(b=1.0)
    cost = LayerCost(one, one, one, one, recompute=one, expert_exchange=Quadratic(b=0.8, c=0.1))
    wide = with_experts_on_ranks(cost, 4)
    assert [getattr(wide, name) for name in ("forward", "input_gradient", "recompute")] == [Quadratic(b=1.6, c=0.1)] * 3
    assert wide.weight_gradient == one


@pytest.mark.parametrize(("capacity", "exchange", "ep"), [(26_000, 0.05, 2), (1e9, 0.05, 1)], ids=["short", "plenty"])
def test_experts_are_divided_where_memory_asks_for_it(capacity: float, exchange: float, ep: int) -> None:
    """One layer, which only context parallelism divides: 40,000 bytes with all experts, 24,000 with half of them."""
    costs = _without_tp(exchange)
    rules = ParameterBytes(1.0, 1.0, 2.0)
    found = find(MODEL, costs, {"language": 8}, 2, 2, machine=cluster(1, 2, capacity), rules=rules)
    stages = [stage for one in found.winner.plan.units[0].replicas for stage in one.stages]
    assert {stage.ep for stage in stages} == {ep}


@pytest.mark.parametrize(("capacity", "ep"), [(26_000, 2), (1e9, 1)], ids=["short", "plenty"])
def test_replicas_divide_experts_where_memory_asks_for_it(capacity: float, ep: int) -> None:
    """The same layer, which no ranks divide: two replicas, or one whose two ranks have half of the experts each."""
    every = _costs(0.05)
    costs = replace(every, layers={"language": {Degrees(): every.layers["language"][Degrees()]}})
    rules = ParameterBytes(1.0, 1.0, 2.0)
    found = find(MODEL, costs, {"language": 8}, 2, 2, machine=cluster(1, 2, capacity), rules=rules)
    stages = [stage for one in found.winner.plan.units[0].replicas for stage in one.stages]
    assert {(stage.tp, stage.cp, stage.ep) for stage in stages} == {(1, 1, ep)}
    assert sum(len(stage.ranks) for stage in stages) == 2


def test_a_group_computes_its_samples_and_the_fullest_decides() -> None:
    """Samples of 6, 2 and 4 tokens: groups of 6 and 6 tokens take half of the time, of 6 alone as long as one rank.
    Tokens of the other half of the experts travel; between nodes all devices of a node share its ports."""
    machine = cluster(2, 2)
    alone = _plan(Stage(0, 1, (0,)))
    for ranks, way in (((0, 1), 1.0), ((0, 2), 1e9 / (1e8 / 2))):
        plan, exchange = _plan(Stage(0, 1, ranks, ep=2)), 0.5 * 0.05 * way
        costs = stage_costs(plan, MODEL, _costs(0.05), RULES, machine)
        for batch, factor in (((0, 1, 2), 0.5), ((0,), 1.0)):
            assignment = Assignment({"language": ((batch,),)})
            took = [
                predict(one, assignment, one_f_one_b(one, assignment), own, {"language": [6, 2, 4]}).seconds
                for one, own in ((alone, stage_costs(alone, MODEL, _costs(), RULES)), (plan, costs))
            ]
            tokens = 12 if len(batch) == 3 else 6
            passes = 2 * exchange * tokens * factor  # forward and backward
            assert took[1] == pytest.approx(factor * took[0] + passes, rel=1e-4)  # latencies of microseconds


def test_a_pipeline_on_idle_devices_divides_experts_where_memory_asks_for_it() -> None:
    """Two pipelines of two ranks each: three divide the batch into no microbatches of one or two samples."""
    costs, rules, machine = _without_tp(0.05), ParameterBytes(1.0, 1.0, 2.0), cluster(1, 6, 27_000)
    language = costs.layers["language"]  # between replicas tokens travel longer
    language[Degrees()] = replace(language[Degrees()], expert_exchange=Quadratic(b=0.4))
    workload = Workload({"language": np.full(8, 8.0)})
    scorer = PlanSimulator(MODEL, costs, machine, workload, 8, rules=rules)
    found = search(MODEL, costs, machine, workload, 8, scorer, (1, 2), rules, fills_idle=True)
    (unit,) = found.winner.plan.units
    assert [[stage.degrees for stage in one.stages] for one in unit.replicas] == [[Degrees(cp=2, ep=2)]] * 3


def test_gradients_that_nobody_else_has_can_make_it_faster() -> None:
    """Memory for all experts, but a link that would carry their gradients for longer than tokens travel."""
    slow = replace(cluster(1, 2), inside=Link(100.0, 0.0))
    workload = Workload({"language": np.full(2, 8.0)})
    table = OptionTable(UnitLayers(MODEL, _costs(0.05), workload, 2, RULES, 2), math.inf)
    space = Space(MODEL, roles_of(MODEL), table, table, slow, 2, np.full(2, 8.0))
    estimates = {
        one.options[0].chain.degrees.ep: one.estimate
        for one in shapes(space, 1, 2)
        if one.options[0].chain.degrees.axes == (1, 2)
    }
    assert estimates[2] < estimates[1]
