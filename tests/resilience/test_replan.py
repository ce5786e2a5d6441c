"""Whoever is lost, the next plan is valid for those who are left, and keeps what nobody has to move."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from dilatant.config.degrees import Degrees
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan
from dilatant.plan.validate import plan_problems
from dilatant.resilience.worker.replan import replan

LAYERS = {"vision": 3, "language": 6}
FEEDS = {"vision": ("language",), "language": ()}
MODEL = ModelSpec(
    tuple(
        UnitSpec(name, tuple(LayerSpec(f"{name}.{i}", name, 0, True) for i in range(count)), FEEDS[name])
        for name, count in LAYERS.items()
    )
)
LINK = Link(bandwidth=1.0)


def plan_of(vision: ParallelSpec, language: ParallelSpec, colocated: bool = False) -> Plan:
    specs = {"vision": vision, "language": language}
    return plan_from_specs(LAYERS, specs, FEEDS, {"vision": "language"} if colocated else {})


PLANS = {
    "apart": plan_of(ParallelSpec(replicas=2), ParallelSpec(replicas=2, pp=2)),
    "colocated": plan_of(ParallelSpec(replicas=3), ParallelSpec(replicas=3, pp=2), colocated=True),
    "chain": plan_of(ParallelSpec(), ParallelSpec(pp=3)),
    "tensor": plan_of(ParallelSpec(tp=2), ParallelSpec(replicas=2, tp=2)),
    "copies": plan_of(ParallelSpec(replicas=4), ParallelSpec(replicas=4), colocated=True),
    "interleaved": plan_of(ParallelSpec(), ParallelSpec(replicas=2, pp=2, chunks=2)),
}


def require_valid(plan: Plan, size: int) -> None:
    cluster = Cluster(1, size, float("inf"), LINK, LINK)
    assert plan_problems(plan, MODEL, cluster) == []
    assert plan.ranks == tuple(range(size))


@pytest.mark.parametrize("name", PLANS)
def test_every_loss_leaves_a_valid_plan(name: str) -> None:
    plan = PLANS[name]
    size = len(plan.ranks)
    for count in range(1, size):
        for alive in itertools.combinations(range(size), count):
            survivors = {old: new for new, old in enumerate(alive)}
            require_valid(replan(plan, "language", survivors, (), 1, 8), count)


@pytest.mark.parametrize("seed", range(10))
def test_a_history_of_losses_and_joins_stays_valid(seed: int) -> None:
    draw = random.Random(seed)
    plan = PLANS[draw.choice(sorted(PLANS))]
    for _ in range(12):
        size = len(plan.ranks)
        alive = sorted(draw.sample(range(size), draw.randint(1, size)))
        joined = draw.choice((0, 0, 1, 2))
        survivors = {old: new for new, old in enumerate(alive)}
        plan = replan(
            plan, "language", survivors, range(len(alive), len(alive) + joined), draw.choice((0, 1, 2)), 8
        )
        require_valid(plan, len(alive) + joined)


def test_replicas_that_lost_nobody_stay_as_they_are() -> None:
    plan = PLANS["copies"]
    new = replan(plan, "language", {0: 0, 1: 1, 3: 2}, (), 1, 12)
    assert new.unit("language").replicas == plan.unit("language").replicas[:3]
    assert new.unit("vision").replicas == plan.unit("vision").replicas[:3]


def test_unit_without_ranks_moves_to_language_model_ranks() -> None:
    new = replan(PLANS["chain"], "language", {1: 0, 2: 1, 3: 2}, (), 0, 8)
    assert new.unit("vision").replicas[0].stages[0].ranks == (0,)
    assert [stage.ranks for stage in new.unit("language").replicas[0].stages] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("hosted", [False, True])
def test_stages_take_equally_long_by_the_costs_that_the_run_uses(hosted: bool) -> None:
    """Also those of a unit on the ranks of another."""
    plan = plan_of(ParallelSpec(pp=2), ParallelSpec(replicas=1, pp=3), colocated=hosted)
    seconds = {"vision": [1.0, 1.0, 9.0], "language": [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    lost = 0 if hosted else 4
    left = {rank: new for new, rank in enumerate(rank for rank in plan.ranks if rank != lost)}
    new = replan(plan, "language", left, (), 0, 1, seconds)  # one microbatch makes one pipeline
    assert [stage.first for stage in new.unit("language").replicas[0].stages] == [0, 1]
    assert not hosted or [stage.first for stage in new.unit("vision").replicas[0].stages] == [0, 2]


@pytest.mark.parametrize("name", PLANS)
def test_what_is_recomputed_stays(name: str) -> None:
    """Also where nothing else does: memory asks for it."""
    again = {"vision": ("block",) * 3, "language": ("none", *("block_keep_attention",) * 5)}
    plan = Plan(tuple(replace(unit, recompute=again[unit.name]) for unit in PLANS[name].units))
    size = len(plan.ranks)
    for lost in (0, size - 1):
        left = [rank for rank in range(size) if rank != lost]
        new = replan(plan, "language", dict(zip(left, range(size - 1))), (), 1, 8)
        assert {unit.name: unit.recompute for unit in new.units} == again


def test_experts_stay_divided_where_stages_are_made_anew() -> None:
    plan = plan_of(ParallelSpec(), ParallelSpec(replicas=2, pp=2, tp=2, ep=2))
    lost = plan.unit("language").replicas[1].stages[0].ranks
    left = [rank for rank in range(len(plan.ranks)) if rank not in lost]
    new = replan(plan, "language", dict(zip(left, range(len(left)))), (), 1, 8)
    require_valid(new, len(left))
    stages = [stage for replica in new.unit("language").replicas for stage in replica.stages]
    assert {(stage.tp, stage.ep) for stage in stages} == {(2, 2)}


@pytest.mark.parametrize("name", ["apart", "copies", "colocated", "tensor", "interleaved"])
def test_no_unit_is_left_with_one_copy_that_had_two(name: str) -> None:
    """Whoever is lost first: the next loss must not be that of a unit."""
    plan = PLANS[name]
    size = len(plan.ranks)
    for lost in range(size):
        left = [rank for rank in range(size) if rank != lost]
        new = replan(plan, "language", dict(zip(left, range(size - 1))), (), 1, 8)
        for unit in plan.units:
            assert len(new.unit(unit.name).replicas) >= min(2, len(unit.replicas)), (lost, unit.name)


def test_a_unit_on_the_ranks_of_another_divides_them_in_its_own_way() -> None:
    plan = plan_of(ParallelSpec(replicas=2, cp=2), ParallelSpec(replicas=2, pp=2, tp=2), colocated=True)
    lost = plan.unit("vision").replicas[1].stages[0].ranks
    left = [rank for rank in plan.ranks if rank not in lost]
    new = replan(plan, "language", dict(zip(left, range(len(left)))), (), 1, 8)
    require_valid(new, len(left))
    degrees = {
        unit.name: {stage.degrees for replica in unit.replicas for stage in replica.stages}
        for unit in new.units
    }
    assert degrees == {"vision": {Degrees(cp=2)}, "language": {Degrees(tp=2)}}
