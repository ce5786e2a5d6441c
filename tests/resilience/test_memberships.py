"""After any loss, the next plan is valid for the remaining ranks and keeps pipelines that need not change."""

from __future__ import annotations

import itertools
import operator
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.config.degrees import Degrees
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.errors import PlanError
from dilatant.plan.manual import plan_from_specs
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import ParallelSpec, Plan, UnitPlan
from dilatant.plan.templates.membership import ChainCosts, MembershipPlanner, pipelines_of, ranks_of
from dilatant.plan.templates.templates import LayerMemory
from dilatant.plan.validate import plan_problems
from harness.memberships import FEEDS, LAYERS, PLANS, plan_of, planner_like, require_fit

MODEL = ModelSpec(
    tuple(
        UnitSpec(name, tuple(LayerSpec(f"{name}.{i}", name, 0, True) for i in range(count)), FEEDS[name])
        for name, count in LAYERS.items()
    )
)
LINK = Link(bandwidth=1.0)


def require_valid(plan: Plan, size: int) -> None:
    """Check that a plan trains on some of `size` ranks, and on all if it has no stages of several."""
    cluster = Cluster(1, size, float("inf"), LINK, LINK)
    assert plan_problems(plan, MODEL, cluster) == []
    if all(len(placed.stage.ranks) == 1 for placed in plan.stages()):
        assert plan.ranks == tuple(range(size))


def after(plan: Plan, survivors: dict[int, int], joined: int = 0, **costs: Any) -> Plan:
    """Return the next plan with one rank per node."""
    return planner_like(plan, **costs).next(plan, survivors, range(len(survivors) + joined)).plan


def left_of(plan: Plan, *lost: int) -> dict[int, int]:
    return {old: new for new, old in enumerate(rank for rank in plan.ranks if rank not in lost)}


@pytest.mark.parametrize("name", PLANS)
def test_every_loss_leaves_a_valid_plan(name: str) -> None:
    plan = PLANS[name]
    size, planner = len(plan.ranks), planner_like(plan)
    for count in range(1, size):
        for alive in itertools.combinations(range(size), count):
            survivors = {old: new for new, old in enumerate(alive)}
            require_valid(planner.next(plan, survivors, range(count)).plan, count)


@pytest.mark.parametrize("seed", range(10))
def test_a_history_of_losses_and_joins_stays_valid(seed: int) -> None:
    draw = random.Random(seed)
    plan = PLANS[draw.choice(sorted(PLANS))]
    planner = planner_like(plan, fault_tolerance=draw.choice((0, 1, 2)))
    for _ in range(12):
        size = len(plan.ranks)
        alive = sorted(draw.sample(range(size), draw.randint(1, size)))
        joined = draw.choice((0, 0, 1, 2))
        survivors = {old: new for new, old in enumerate(alive)}
        plan = planner.next(plan, survivors, range(len(alive) + joined)).plan
        require_valid(plan, len(alive) + joined)


def test_replicas_that_lost_nobody_stay_as_they_are() -> None:
    plan = PLANS["copies"]
    new = after(plan, left_of(plan, 2), num_microbatches=12)
    assert new.unit("language").replicas == plan.unit("language").replicas[:3]
    assert new.unit("vision").replicas == plan.unit("vision").replicas[:3]


@pytest.mark.parametrize("bandwidth", [1e-3, 1e9])
def test_what_is_intact_moves_only_for_more_than_the_move_costs(bandwidth: float) -> None:
    """A very uneven pipeline of the user's layout is rebuilt over fast links and kept over slow ones."""
    uneven = ParallelSpec(replicas=2, pp=2, cuts=(0, 1))
    plan = plan_of(ParallelSpec(replicas=2, pp=2), uneven, colocated=True)
    planner = planner_like(plan, bytes_per_second=bandwidth, fault_tolerance=0)
    new = planner.next(plan, left_of(plan, 3), range(3))
    before = [unit.replicas[0] for unit in plan.units]
    assert (new.kept == 1) == ([unit.replicas[0] for unit in new.plan.units] == before) == (bandwidth < 1)


def test_stages_take_equally_long_by_the_costs_that_the_run_uses() -> None:
    plan = plan_of(ParallelSpec(pp=2), ParallelSpec(replicas=1, pp=3))
    seconds = {"vision": [1.0, 1.0, 9.0], "language": [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    new = after(plan, left_of(plan, 4), seconds=seconds, num_microbatches=100, fault_tolerance=0, capacity=6.0)
    stages = [(stage.first, stage.end) for stage in new.unit("vision").replicas[0].stages]
    assert stages in ([(0, 3)], [(0, 2), (2, 3)])


@pytest.mark.parametrize("name", PLANS)
def test_what_is_recomputed_stays(name: str) -> None:
    """The recomputation stays even if no stage does, since memory requires it."""
    again = {"vision": ("block",) * 3, "language": ("none", *("block_keep_attention",) * 5)}
    plan = Plan(tuple(replace(unit, recompute=again[unit.name]) for unit in PLANS[name].units))
    for lost in (0, len(plan.ranks) - 1):
        new = after(plan, left_of(plan, lost))
        assert {unit.name: unit.recompute for unit in new.units} == again


@pytest.mark.parametrize("tp", [2, 1])
def test_experts_stay_divided_where_stages_are_made_anew(tp: int) -> None:
    plan = plan_of(ParallelSpec(), ParallelSpec(replicas=2, pp=2, tp=tp, ep=2))
    lost = (0, *plan.unit("language").replicas[1].stages[0].ranks)
    new = after(plan, left_of(plan, *lost))
    require_valid(new, len(plan.ranks) - 3)
    stages = [stage for replica in new.unit("language").replicas for stage in replica.stages]
    assert {(stage.tp, stage.ep) for stage in stages} == {(tp, 2)}


@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (4, 5), (6, 7)], ids=str)
def test_a_lost_node_ends_only_the_group_of_nodes_that_divides_experts_with_it(lost: tuple[int, ...]) -> None:
    """Two replicas of four ranks, each on two nodes: the other goes on as it is, and the lost one's node waits."""
    plan = plan_of(ParallelSpec(replicas=2, ep=4), ParallelSpec(replicas=2, ep=4), colocated=True)
    planner = planner_like(plan, devices=2, capacity=4.0)  # a smaller group has no memory for all experts
    survivors = left_of(plan, *lost)
    found = planner.next(plan, survivors, [rank // 2 for rank in range(len(survivors))])
    (kept,) = found.plan.unit("language").replicas
    whole = plan.unit("language").replicas[int(lost[0] < 4)]
    assert kept == whole.renamed(survivors)
    assert len(found.idle) == 2
    back = planner.next(found.plan, {rank: rank for rank in range(6)}, [rank // 2 for rank in range(8)])
    assert {stage.ep for replica in back.plan.unit("language").replicas for stage in replica.stages} == {4}
    assert len(back.plan.unit("language").replicas) == 2


@pytest.mark.parametrize("name", ["apart", "copies", "colocated", "tensor", "interleaved"])
def test_no_unit_is_left_with_one_copy_that_had_two(name: str) -> None:
    """After the loss of any rank, the next loss must not take the last copy of a unit."""
    plan = PLANS[name]
    for lost in plan.ranks:
        new = after(plan, left_of(plan, lost))
        for unit in plan.units:
            assert len(new.unit(unit.name).replicas) >= min(2, len(unit.replicas)), (lost, unit.name)


@pytest.mark.parametrize(("devices", "lost"), [(1, (5,)), (2, (6, 7))])
def test_tensor_parallel_groups_are_rebuilt_though_single_ranks_are_faster(devices: int, lost: tuple[int, ...]) -> None:
    """Ranks that lost a member form groups again; stages of one rank are made only where no group is left."""
    plan = plan_of(ParallelSpec(replicas=2, tp=2), ParallelSpec(replicas=2, pp=2, tp=2), colocated=True)
    planner = planner_like(plan, devices=devices, bytes_per_second=1e-3)
    seconds = {width: [1.0 if width == 1 else 0.9] * 9 for width in (1, 2)}  # a pipeline of two ranks takes half
    planner = MembershipPlanner(replace(planner.costs, seconds=seconds, narrowest={"vision": 2, "language": 2}))
    survivors = left_of(plan, *lost)
    found = planner.next(plan, survivors, [rank // devices for rank in range(len(survivors))])
    assert {stage.ranks for stage in map(operator.attrgetter("stage"), found.plan.stages())} == {(0, 1), (2, 3), (4, 5)}
    assert found.plan.unit("language").replicas[0] == plan.unit("language").replicas[0]
    assert found.idle == tuple(range(6, len(survivors)))
    assert found.microbatch_seconds == pytest.approx(0.9 * 9)  # of the pipeline of one group
    alone = planner.next(found.plan, {0: 0}, [0])
    assert {placed.stage.ranks for placed in alone.plan.stages()} == {(0,)}
    free = MembershipPlanner(replace(planner.costs, narrowest={}))
    assert 1 in {len(p.stage.ranks) for p in free.next(plan, survivors, [*range(len(survivors))]).plan.stages()}


def test_a_unit_on_the_ranks_of_another_divides_them_in_its_own_way() -> None:
    plan = plan_of(ParallelSpec(replicas=2, cp=2), ParallelSpec(replicas=2, pp=2, tp=2), colocated=True)
    new = after(plan, left_of(plan, *plan.unit("vision").replicas[1].stages[0].ranks))
    require_valid(new, 6)
    degrees = {
        unit.name: {stage.degrees for replica in unit.replicas for stage in replica.stages} for unit in new.units
    }
    assert degrees == {"vision": {Degrees(cp=2)}, "language": {Degrees(tp=2)}}


def has_chain(costs: ChainCosts, devices: int, groups: int) -> bool:
    """Return True if a chain of stages holds all layers on up to `groups` groups of `devices` devices, by trying all
    stages from the last one on. A stage keeps microbatches by its place from the end, and lies in one group."""
    memory, seen = costs.memory, set[tuple[int, int, int]]()

    def fits(width: int, layers: slice, place: int) -> bool:
        kept = min(place + memory.early, costs.num_microbatches) * sum(memory.activation_bytes[width][layers])
        return sum(memory.state_bytes[width][layers]) + kept <= memory.capacity_bytes

    def found(end: int, used: int, place: int) -> bool:
        if end == 0 or used == groups * devices or (end, used, place) in seen:
            return end == 0 and used % devices == 0
        seen.add((end, used, place))
        return any(
            fits(width, slice(first, end), place) and found(first, used + width, place + 1)
            for width in memory.state_bytes
            if width <= devices - used % devices
            for first in range(end)
        )

    return found(len(costs.layer_bytes), 0, 1)


def require_memory(plan: Plan, planner: MembershipPlanner) -> None:
    """Check the memory of all stages, counted by their places in their pipelines; several units lie in one chain."""
    costs, memory = planner.costs, planner.costs.memory
    for one in pipelines_of(plan):
        held: dict[tuple[int, ...], list[float]] = {}
        begin = 0
        for name, (replica,) in one.items():
            for stage in replica.stages:
                layers, width = slice(begin + stage.first, begin + stage.end), len(stage.ranks)
                own = held.setdefault(stage.ranks, [0.0, 0.0])
                own[0] += sum(memory.state_bytes[width][layers])
                own[1] += sum(memory.activation_bytes[width][layers])
            begin += costs.layers[name]
        for place, (state, kept) in enumerate(reversed(held.values()), 1):
            count = min(place + memory.early, costs.num_microbatches)
            assert state + count * kept <= memory.capacity_bytes * (1 + 1e-9)


@settings(max_examples=75, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_there_is_a_plan_whenever_a_pipeline_fits(seed: int) -> None:
    """For drawn memories and histories of nodes, of which some have fewer devices, ranks that no pipelines fill are
    idle; plans are valid, within memory, and have no more idle ranks than a pipeline has."""
    draw = random.Random(seed)
    devices, total = draw.choice((1, 1, 2)), sum(LAYERS.values())
    specs = {name: ParallelSpec(tp=devices) for name in LAYERS}
    model = plan_from_specs(LAYERS, specs, FEEDS, {"vision": "language"})
    planner = planner_like(model, draw.choice((0, 1, 2)), draw.randint(1, 12), devices=devices)
    state = [draw.choice((0.2, 1.0, 3.0)) for _ in range(total)]
    kept = [draw.choice((0.0, 0.1, 2.0)) for _ in range(total)]
    widths = planner.costs.seconds
    memory = LayerMemory(
        {width: [own / width for own in state] for width in widths},
        {width: [own / width for own in kept] for width in widths},
        draw.uniform(2.0, 1.2 * (sum(state) + sum(kept))),
        draw.choice((0, 1)),
    )
    planner = MembershipPlanner(replace(planner.costs, memory=memory))
    plan = Plan(tuple(UnitPlan(name, (), tuple(feeds)) for name, feeds in FEEDS.items()))
    nodes: list[tuple[int, int]] = []  # number, devices
    following, old = itertools.count(), dict[tuple[int, int], int]()
    for _ in range(draw.randint(1, 6)):
        stay = draw.sample(nodes, draw.randint(0, len(nodes)))
        here = [node for node in nodes if node in stay]
        here += [(next(following), draw.choice((devices, devices, 1))) for _ in range(draw.randint(0, 6))]
        seats = [(node, place) for node, count in here for place in range(count)]
        node_of = [node for node, _ in seats]
        survivors = {old[seat]: rank for rank, seat in enumerate(seats) if seat in old}
        fitting = [
            size
            for size in range(1, devices + 1)
            if devices % size == 0 and has_chain(planner.costs, size, sum(count // size for _, count in here))
        ]
        if not fitting:
            with pytest.raises(PlanError):
                planner.next(plan, survivors, node_of)
            return
        found = planner.next(plan, survivors, node_of)
        require_memory(found.plan, planner)
        assert plan_problems(found.plan, MODEL, Cluster(1, len(seats), float("inf"), LINK, LINK)) == []
        assert all(len({node_of[rank] for rank in p.stage.ranks}) == 1 for p in found.plan.stages())
        assert sorted((*found.plan.ranks, *found.idle)) == [*range(len(seats))]
        smallest = min(len(ranks_of(one)) for one in pipelines_of(found.plan))
        assert len(found.idle) < smallest + len(here) * (devices - 1)
        plan, nodes, old = found.plan, here, {seat: rank for rank, seat in enumerate(seats)}


def test_a_node_that_no_pipeline_needs_is_idle_and_takes_over() -> None:
    """Every layer needs a node of its own: a tenth node holds nothing, and takes the place of one that is lost, whose
    layer nobody else has; pipelines of nodes with state stay where they are."""
    planner = planner_like(PLANS["copies"], capacity=2.0)
    first = planner.first(10)
    assert (first.idle, first.plan.ranks) == ((9,), tuple(range(9)))
    lost = planner.next(first.plan, {rank: rank - (rank > 4) for rank in range(10) if rank != 4}, range(9))
    assert (lost.idle, lost.moved_bytes) == ((), 1)
    assert [p.stage for p in lost.plan.stages_of_rank[8]] == [
        replace(p.stage, ranks=(8,)) for p in first.plan.stages_of_rank[4]
    ]
    joined = planner.next(first.plan, {rank: rank for rank in range(10)}, range(12))
    assert (joined.plan, joined.idle, joined.kept) == (first.plan, (9, 10, 11), 1)


def test_a_rebuild_counts_the_state_of_both_parts() -> None:
    planner = planner_like(PLANS["copies"], capacity=12.0)
    whole, halves = planner.first(2).plan, planner_like(PLANS["copies"], 0, capacity=7.0).first(2).plan
    assert [len(ranks_of(one)) for plan in (whole, halves) for one in pipelines_of(plan)] == [1, 1, 2]
    found = {(one, other): planner.holds_both((whole, one), (halves, other)) for one in (0, 9) for other in (0, 1, 9)}
    assert found == {(0, 0): False, (0, 1): False, (0, 9): True, (9, 0): True, (9, 1): True, (9, 9): True}


def test_the_last_node_may_have_fewer_devices() -> None:
    """A pipeline takes two whole nodes of two devices; one device of a third node is left."""
    model = plan_from_specs(LAYERS, {name: ParallelSpec(tp=2) for name in LAYERS}, FEEDS, {"vision": "language"})
    planner = planner_like(model, 0, devices=2, capacity=3.5)
    found = planner.next(Plan(tuple(UnitPlan(n, (), f) for n, f in FEEDS.items())), {}, [0, 0, 1, 1, 2])
    assert found.idle == (4,)
    require_memory(found.plan, planner)


def test_pipelines_do_not_shrink_below_what_memory_asks_for() -> None:
    """Stages have at most five layers: five ranks form pipelines of two and three, and one rank cannot train."""
    plan = plan_of(ParallelSpec(replicas=2), ParallelSpec(replicas=2, pp=2))
    planner = planner_like(plan, capacity=6.0)
    found = planner.next(plan, left_of(plan, 5), range(5))
    assert sorted(len(ranks_of(one)) for one in pipelines_of(found.plan)) == [2, 3]
    assert found.tolerance == 1
    with pytest.raises(PlanError, match=r"no pipeline of 1 to 1 nodes .* the smallest takes 2;"):
        planner.next(plan, {0: 0}, range(1))


def test_pipelines_that_share_a_node_are_lost_together() -> None:
    """No pipeline uses all 16 devices of a node, so two of 8 share each."""
    planner = planner_like(PLANS["copies"], fault_tolerance=3, devices=16)
    found = planner.first(2)
    assert len(pipelines_of(found.plan)) > 2
    assert found.tolerance == 1


def test_pipelines_that_share_a_node_but_no_layer_there_survive_its_loss() -> None:
    """Every layer needs a device of its own: two pipelines of nine fill nine nodes of two, and share the fifth."""
    found = planner_like(PLANS["chain"], capacity=2.0, devices=2).first(9)
    assert [len(ranks_of(one)) for one in pipelines_of(found.plan)] == [9, 9]
    assert found.tolerance == 1


@pytest.mark.parametrize("capacity", [float("inf"), 12.0])
def test_after_out_of_memory_no_rank_is_as_full_again(capacity: float) -> None:
    """Whatever the costs say: a few rounds end in a plan that fits, or in none."""
    planner = planner_like(PLANS["copies"], capacity=capacity)
    plan = planner.first(4).plan
    everyone = {rank: rank for rank in plan.ranks}
    for _ in range(2):
        smaller = planner.below(plan, 0)
        assert smaller.below(plan, 0) is smaller  # with its templates
        assert smaller.costs.memory.capacity_bytes <= 0.95 * planner.costs.memory.capacity_bytes
        planner, before = smaller, plan
        plan = planner.next(plan, everyone, range(4)).plan
        assert plan != before
        require_fit(plan, planner)


def test_another_rank_than_the_fullest_may_run_out_of_memory() -> None:
    plan = plan_of(ParallelSpec(), ParallelSpec(pp=3, cuts=(0, 4, 5)), colocated=True)
    planner = planner_like(plan, capacity=20.0)
    limits = [planner.below(plan, rank).costs.memory.capacity_bytes for rank in plan.ranks]
    assert limits == sorted(limits, reverse=True)
    assert limits[2] < limits[0] < 20.0
