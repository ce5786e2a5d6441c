"""The planner counts optimizer state once among those who share it, as they will."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilatant.config.degrees import ONE
from dilatant.config.memory_modes import SHARDS, Shard
from dilatant.cost.layer import LayerCost
from dilatant.cost.memory import GLOO_COPIES, NCCL_COPIES, ParameterBytes, Zero
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan.boxes import Box
from dilatant.plan.buckets import Format, Holding, make_buckets, shard_of
from dilatant.plan.cluster import Cluster, Link
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.costs.sync_time import shard_seconds, sharing, sync_seconds
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.families.families import serial
from dilatant.schedule.schedule import ActionKind, Assignment
from dilatant.schedule.simulator.predict import predict

LAYERS = 4
MODEL = ModelSpec((UnitSpec("u", tuple(LayerSpec(str(layer), "u", 1000) for layer in range(LAYERS))),))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Unlike replicas of one unit, each rank a stage of its own."""
    ranks = itertools.count()
    replicas = []
    for _ in range(draw(st.integers(1, 5))):
        inner = draw(st.lists(st.integers(1, LAYERS - 1), max_size=3, unique=True).map(sorted))
        cuts = [0, *inner, LAYERS]
        replicas.append(Replica(tuple(Stage(a, b, (next(ranks),)) for a, b in itertools.pairwise(cuts))))
    return Plan((UnitPlan("u", tuple(replicas)),))


@given(plans(), st.sampled_from(["none", "node", "all"]), st.integers(1, 6))
def test_sharing_is_what_buckets_of_such_layers_do(plan: Plan, zero: Zero, per_node: int) -> None:
    rules = ParameterBytes(zero=zero, ranks_per_node=per_node)
    node_of = [rank // per_node for rank in plan.ranks]
    shared = sharing(plan, MODEL, rules)
    for entry in plan.stages():
        (rank,) = entry.stage.ranks
        for layer in range(entry.stage.first, entry.stage.end):
            holders = [p.stage.ranks[0] for p in plan.stages() if p.stage.first <= layer < p.stage.end]
            held = {"w": Holding({holder: Box.of("w", (1000,)) for holder in holders})}
            (bucket,) = make_buckets(held, {"w": Format("float32", 4)}, ["w"], 1 << 30)
            own = sum(box.size for box in shard_of(bucket, rank, zero, node_of).own)
            assert own == pytest.approx(1000 / shared[entry.index][layer - entry.stage.first], abs=1)


def test_tensor_parallel_ranks_count_by_the_part_that_they_hold() -> None:
    replicas = (Replica((Stage(0, 2, (0, 1), tp=2),)), Replica((Stage(0, 2, (2,)),)))
    plan = Plan((UnitPlan("u", replicas),))
    model = ModelSpec((UnitSpec("u", (LayerSpec("0", "u", 1), LayerSpec("1", "u", 1, divided=False))),))
    (split, whole) = sharing(plan, model, ParameterBytes(zero="all"))
    # Of the layer that nobody divides three ranks hold all.
    np.testing.assert_array_equal(split, [2.0, 3.0])
    np.testing.assert_array_equal(whole, [2.0, 3.0])


def test_a_stage_on_several_nodes_counts_where_the_fewest_share() -> None:
    """Its ranks 1 and 2 lie on two nodes of two; beside rank 1 another replica is on rank 0."""
    across, beside = Stage(0, LAYERS, (1, 2), cp=2), Stage(0, LAYERS, (0,))
    plan = Plan((UnitPlan("u", (Replica((across,)), Replica((beside,)))),))
    for zero, expected in (("none", (1.0, 1.0)), ("node", (1.0, 2.0)), ("all", (3.0, 3.0))):
        rules = ParameterBytes(zero=zero, ranks_per_node=2)  # type: ignore[arg-type]
        for shared, ranks in zip(sharing(plan, MODEL, rules), expected, strict=True):
            np.testing.assert_array_equal(shared, [ranks] * LAYERS)


def test_what_is_sharded_travels_in_actions_instead_of_after_them() -> None:
    """Four ranks pass 3/4 of 4,000 parameters round a ring of 1,000 bytes a second: 3 s per byte of a parameter."""
    names = ("embedding", "layers.0", "layers.1", "head")
    model = ModelSpec((UnitSpec("u", tuple(LayerSpec(f"u.{name}", "u", 1000) for name in names)),))
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, LAYERS, (rank,)),)) for rank in range(4))),))
    link = Link(bandwidth=1000.0)
    cluster = Cluster(1, 4, math.inf, link, link)

    def seconds(shard: Shard) -> tuple[float, float, tuple[float, ...] | None]:
        rules = ParameterBytes(zero="all", shard=(("u", shard),))
        sums = sync_seconds(plan, model, cluster, rules)
        return sums.beside[0], sums.after[0], shard_seconds(plan, model, cluster, rules).get(3)

    # Gradients of 4 bytes, weights of 2; all but one of the two blocks is exposed, and that slows others by a fifth.
    # The fifth number is of the first forward alone.
    assert seconds("none") == (pytest.approx(12), pytest.approx(6), None)
    assert seconds("gradients") == (0.0, pytest.approx(6), pytest.approx((0, 12, 0, 12, 0, 0.8)))
    assert seconds("weights") == (0.0, 0.0, pytest.approx((6, 18, 6, 12, 0, 0.8)))
    assert seconds("weights_by_step") == (0.0, 0.0, pytest.approx((0, 12, 0, 12, 6, 0.8)))


ADAPTED = ModelSpec(
    (
        UnitSpec(
            "u",
            (
                LayerSpec("u.embedding", "u", 1000, trainable=False),
                LayerSpec("u.layers.0", "u", 1000, trainable=False),
                LayerSpec("u.layers.1", "u", 1000, fixed=900),
                LayerSpec("u.head", "u", 1000, trainable=False),
            ),
        ),
    )
)
"""Only the second block has an adapter, so that the first one runs forward alone."""


def test_frozen_weights_are_gathered_in_backwards_that_need_them() -> None:
    """As above: 3 s for each byte of 4,000 parameters. A backward needs 3,000 of them, and 100 train."""
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, LAYERS, (rank,)),)) for rank in range(4))),))
    link = Link(bandwidth=1000.0)
    cluster = Cluster(1, 4, math.inf, link, link)
    found: dict[Shard, tuple[float, ...]] = {}
    for shard in SHARDS[1:]:
        rules = ParameterBytes(zero="all", shard=(("u", shard),))
        found[shard] = shard_seconds(plan, ADAPTED, cluster, rules)[0]
    exposed = 0.75 + 0.25 * 0.2
    assert found["gradients"] == pytest.approx((0, 0.3, 0, 0.3, 0, 1.0))  # all in the largest block
    assert found["weights"] == pytest.approx((6, 4.5 + 0.3, 4.5, 0.3, 0, exposed))
    assert found["weights_by_step"] == pytest.approx((0, 0.3, 0, 0.3, 6, exposed))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shard", SHARDS[1:])
def test_a_tied_weight_is_gathered_and_held_once_by_who_holds_both_ends(shard: Shard, trains: bool) -> None:
    """A head that repeats the embedding's 1,000 parameters, and 10 more, is as one of 10: every rank has both."""
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, 3, (rank,)),)) for rank in range(4))),))
    link = Link(bandwidth=1000.0)
    cluster = Cluster(1, 4, math.inf, link, link)
    cost = LayerCost(Quadratic(c=1.0), Quadratic(c=1.0), Quadratic(), Quadratic())
    costs = CostModel("any", "synthetic", "float32", {"u": {ONE: cost}})
    rules = ParameterBytes(zero="all", shard=(("u", shard),))
    found = []
    for size, tied in ((1010, 1000), (10, 0)):
        first, last = LayerSpec("u.embedding", "u", 1000, trains), LayerSpec("u.head", "u", size, trains, tied=tied)
        model = ModelSpec((UnitSpec("u", (first, LayerSpec("u.layers.0", "u", 1000), last)),))
        held = stage_costs(plan, model, costs, rules, cluster)
        seconds = shard_seconds(plan, model, cluster, rules)[0]
        found.append((seconds, held.static_bytes, held.shard_bytes, held.transient_bytes, held.forward_bytes))
    for own, expected in zip(*found, strict=True):
        np.testing.assert_allclose(own, expected)


@pytest.mark.parametrize(
    ("shard", "trained", "frozen"),
    # A frozen weight has no master that could be its only part: under `weights_by_step` the part is beside the whole.
    [("none", 2 + 4 + 3, 2), ("gradients", 2 + 1 + 3, 2), ("weights", 1 + 3, 0.5), ("weights_by_step", 2 + 1 + 3, 2.5)],
)
def test_four_ranks_hold_parts_of_frozen_weights(shard: Shard, trained: float, frozen: float) -> None:
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, LAYERS, (rank,)),)) for rank in range(4))),))
    cost = LayerCost(Quadratic(c=1.0), Quadratic(c=1.0), Quadratic(), Quadratic())
    costs = CostModel("any", "synthetic", "float32", {"u": {ONE: cost}})
    rules = ParameterBytes(zero="all", shard=(("u", shard),))
    held = stage_costs(plan, ADAPTED, costs, rules).static_bytes
    assert held == pytest.approx([100 * trained + 3900 * frozen] * 4)


def test_nccl_needs_one_copy_less_of_a_block_of_gradients() -> None:
    """When a backward has run, the block's gradients, their copies and a part are there: of 4 bytes for 1,000."""
    names = ("embedding", "layers.0", "layers.1", "head")
    model = ModelSpec((UnitSpec("u", tuple(LayerSpec(f"u.{name}", "u", 1000) for name in names)),))
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, LAYERS, (rank,)),)) for rank in range(4))),))
    cost = LayerCost(Quadratic(c=1.0), Quadratic(c=1.0), Quadratic(), Quadratic())
    costs = CostModel("any", "synthetic", "float32", {"u": {ONE: cost}})
    gloo, nccl = (
        stage_costs(plan, model, costs, ParameterBytes(zero="all", shard=(("u", "weights"),), sum_copies=copies))
        for copies in (GLOO_COPIES, NCCL_COPIES)
    )
    np.testing.assert_allclose((gloo.shard_bytes - nccl.shard_bytes)[:, 0, 2], 4 * 1000)


@pytest.mark.parametrize(("layer", "first"), [(2.5, 10 + 0.8 * 6), (0.1, 6.0)])
def test_the_first_forward_waits_for_weights_that_stay(layer: float, first: float) -> None:
    """A forward takes four times `layer`; weights that a step gathers once need 6 s, of which four fifths are exposed
    beside what the forward takes."""
    names = ("embedding", "layers.0", "layers.1", "head")
    model = ModelSpec((UnitSpec("u", tuple(LayerSpec(f"u.{name}", "u", 1000) for name in names)),))
    plan = Plan((UnitPlan("u", tuple(Replica((Stage(0, LAYERS, (rank,)),)) for rank in range(4))),))
    cost = LayerCost(Quadratic(c=layer), Quadratic(c=layer), Quadratic(), Quadratic())
    costs = CostModel("any", "synthetic", "float32", {"u": {ONE: cost}})
    link = Link(bandwidth=1000.0)
    cluster = Cluster(1, 4, math.inf, link, link)
    rules = ParameterBytes(zero="all", shard=(("u", "weights_by_step"),))
    assignment = Assignment({"u": tuple(tuple((3 * rank + n,) for n in range(3)) for rank in range(4))})
    step = predict(
        plan, assignment, serial(plan, assignment), stage_costs(plan, model, costs, rules, cluster), {"u": [1] * 12}
    )
    forwards = [end - start for action, start, end in step.of_rank(0) if action.kind == ActionKind.F]
    assert forwards == pytest.approx([first, 4 * layer, 4 * layer])
