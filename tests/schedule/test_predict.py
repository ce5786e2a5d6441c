"""From a cost model to a timeline: every action and message costs what its layers and samples say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.step_cases import random_step
from dilatant.config.degrees import ONE, Degrees
from dilatant.cost.dense import DenseRows
from dilatant.cost.hardware import Link
from dilatant.cost.layer import LayerCost, frozen_work, trainable_before
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import (
    Cluster,
    LayerSpec,
    ModelSpec,
    Plan,
    Replica,
    Stage,
    StageCosts,
    UnitPlan,
    UnitSpec,
    Workload,
    stage_costs,
)
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.families.families import eager, gpipe, one_f_one_b
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.contention import travel
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.predict import (
    action_seconds,
    message_bytes,
    message_sums,
    op_sums,
    piece_sums,
    predict,
    step_bytes,
)
from dilatant.schedule.trainability import trainability_of
from oracles.event_simulator import samples_of

RECOMPUTE = ("none", "block", "block_keep_attention")
KIND_PART = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


def random_costs(rng: np.random.Generator, kinds: int) -> CostModel:
    def quadratic() -> Quadratic:
        return Quadratic(*rng.random(3))

    layers = {
        f"kind{index}": {
            Degrees(tp): LayerCost(
                *(quadratic() for _ in range(4)),
                recompute=quadratic(),
                attention=quadratic(),
                activation_bytes=quadratic(),
            )
            for tp in (1, 2)
        }
        for index in range(kinds)
    }
    return CostModel("synthetic", "synthetic", "float32", layers)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([name for name in FAMILIES if name != "interleaved"]))
def test_action_seconds_sum_over_layers_and_samples(seed, family):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    costs = random_costs(rng, 3)
    units = []
    for unit in step.plan.units:
        count = max(stage.end for replica in unit.replicas for stage in replica.stages)
        layers = tuple(
            LayerSpec(f"{unit.name}{i}", f"kind{rng.integers(3)}", 5, bool(rng.random() < 0.5)) for i in range(count)
        )
        units.append(UnitSpec(unit.name, layers, unit.feeds, recompute=RECOMPUTE[int(rng.integers(3))]))
    model = ModelSpec(tuple(units))
    trainability = trainability_of(step.plan, model.trainable)
    schedule = FAMILIES[family](step.plan, step.assignment, trainability)
    graph = build(step.plan, step.assignment, schedule)
    tokens = {unit.name: rng.integers(0, 30, 16) for unit in step.plan.units}
    samples = Workload(tokens)
    table = stage_costs(step.plan, model, costs)
    found = action_seconds(graph, table, op_sums(graph, table, piece_sums(graph, samples), samples))
    for op in range(graph.num_ops):
        action = graph.action(op)
        placed = step.plan.stages()[action.stage]
        unit = model.unit(placed.unit)
        before = trainable_before(unit.trainable, model.upstream_trainable(unit.name))
        row = [int(tokens[unit.name][s]) for s in samples_of(step.plan, step.assignment, action)]
        expected = 0.0
        for index in range(placed.stage.first, placed.stage.end):
            layer = unit.layers[index]
            cost = costs.layer(layer.kind, Degrees(placed.stage.tp))
            work = frozen_work(cost, layer.trainable, before[index], unit.recompute)
            curve = getattr(work, KIND_PART[action.kind])
            if sum(row):  # attention keeps samples apart, so squares are per sample
                expected += curve.a * sum(x * x for x in row) + curve.b * sum(row) + curve.c
        # A dozen products summed in another order.
        assert found[op] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        has_work = action.kind == "F" or trainability.backward[action.stage]
        assert has_work


def two_encoders(cluster: Cluster) -> tuple[Plan, Assignment, ModelSpec, CostModel]:
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 1, (0,)),)),), ("language",)),
            UnitPlan("audio", (Replica((Stage(0, 1, (1,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 1, (cluster.gpus_per_node,)),)),)),
        )
    )
    batches = (((0,), (1,)),)
    assignment = Assignment({"vision": batches, "audio": batches, "language": batches})
    model = ModelSpec(
        tuple(
            UnitSpec(name, (LayerSpec(name, "block", 0),), feeds)
            for name, feeds in (("vision", ("language",)), ("audio", ("language",)), ("language", ()))
        )
    )
    cost = LayerCost(*(Quadratic(b=1.0) for _ in range(4)), output_bytes=Quadratic(b=8.0))
    return plan, assignment, model, CostModel("synthetic", "synthetic", "float32", {"block": {ONE: cost}})


def test_messages_take_latency_and_bytes_over_bandwidth():
    cluster = Cluster(2, 2, 1e9, inside=Link(1e9), between=Link(bandwidth=4.0, latency=0.5))
    plan, assignment, model, costs = two_encoders(cluster)
    schedule = gpipe(plan, assignment)
    table = stage_costs(plan, model, costs)
    tokens = {unit: [1, 1] for unit in ("vision", "audio", "language")}
    alone = predict(plan, assignment, schedule, table, tokens, cluster)
    # Both encoders end at 1 s; 8 bytes take 2 s through the port, one message after the other, and 0.5 s.
    assert alone.of_rank(2)[0][1:] == (5.5, 6.5)
    two_ports = replace(cluster, between=Link(bandwidth=8.0, latency=0.5), ports=2)
    # Each leaves through its own, but they meet at that of the language model.
    assert predict(plan, assignment, schedule, table, tokens, two_ports).of_rank(2)[0][1:] == (5.5, 6.5)
    assert alone.seconds > predict(plan, assignment, schedule, table, tokens).seconds


def test_wide_stages_send_shares_and_gather_them():
    cluster = Cluster(2, 4, 1e9, inside=Link(bandwidth=2.0), between=Link(bandwidth=4.0), ports=4)
    wide = Stage(0, 1, (4, 5, 6, 7), tp=2, cp=2)

    def lag(first: Stage, second: Stage) -> float:
        plan = Plan(
            (UnitPlan("vision", (Replica((first,)),), ("language",)), UnitPlan("language", (Replica((second,)),)))
        )
        assignment = Assignment({"vision": (((0,),),), "language": (((0,),),)})
        graph = build(plan, assignment, gpipe(plan, assignment))
        one_of_maker = np.full(graph.num_messages, 8.0 / first.cp)
        return travel(graph, np.zeros(graph.num_ops), one_of_maker, cluster)[1][0]

    # One port of 1 byte a second for 8 bytes; then each place's 4 bytes are gathered of two ranks' halves.
    assert lag(Stage(0, 1, (0,)), wide) == 8.0 + 2.0 / 2.0
    assert lag(Stage(0, 1, (0, 1), tp=2), wide) == 4.0 + 1.0
    # Four ranks that all need all of it have a quarter each when it is there.
    assert lag(Stage(0, 1, (0,)), replace(wide, tp=4, cp=1)) == 8.0 + 8.0 * (1 - 1 / 4) / 2.0
    assert lag(Stage(0, 1, (0, 1, 2, 3), cp=4), wide) == 2.0 + 1.0
    assert lag(replace(wide, ranks=(0, 1, 2, 3)), Stage(0, 1, (4,))) == 8.0
    # The same four ranks: each has 2 of 8 bytes, and gathers with one other what the two of a place need.
    assert lag(replace(wide, tp=1, cp=4), wide) == 4.0 * (1 - 1 / 2) / 2.0
    # Each takes 2 of 8 bytes, of which it has a quarter: those of its items.
    assert lag(wide, replace(wide, tp=1, cp=4)) == 2.0 * (1 - 1 / 4) / 2.0


@pytest.mark.parametrize(
    ("items_per_token", "fullest"),
    [
        (1.0, (9 + 5 + 4) / 2),  # tokens: halves
        (0.5, 5 * 2.0),  # nine items of two tokens
        (0.0, 9.0),  # whole samples: 9 on one rank, 5 and 4 on the other
    ],
)
def test_the_fullest_rank_decides_where_ranks_share_items(items_per_token, fullest):
    plan = Plan((UnitPlan("vision", (Replica((Stage(0, 1, (0, 1), cp=2),)),)),))
    assignment = Assignment({"vision": (((0, 1, 2),),)})
    halved = LayerCost(*(Quadratic(b=0.5, c=7.0) for _ in range(4)), activation_bytes=Quadratic(b=0.5))
    costs = CostModel("synthetic", "synthetic", "float32", {"block": {Degrees(cp=2): halved}})
    layer = LayerSpec("vision", "block", 0)
    model = ModelSpec((UnitSpec("vision", (layer,), items_per_token=items_per_token),))
    table = stage_costs(plan, model, costs)
    timeline = predict(plan, assignment, gpipe(plan, assignment), table, {"vision": [9, 5, 4]})
    # Forward and the first trainable layer's backward, with what each call costs whoever shares it.
    assert timeline.seconds == 2 * (fullest + 7.0)
    assert timeline.peak_bytes is not None
    assert timeline.peak_bytes.tolist() == [fullest] * 2


def test_rows_on_the_same_ranks_travel_no_link():
    cluster = Cluster(1, 2, 1e9, inside=Link(1.0), between=Link(1.0))
    plan, assignment, *_ = two_encoders(cluster)
    together = Plan(tuple(UnitPlan(unit.name, (Replica((Stage(0, 1, (0,)),)),), unit.feeds) for unit in plan.units))
    graph = build(together, assignment, eager(together, assignment))
    size = np.full(graph.num_messages, 100.0)
    assert not travel(graph, np.ones(graph.num_ops), size, cluster)[1].any()


def test_dense_attention_squares_whole_packed_rows():
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)),)),)),))
    assignment = Assignment({"language": (((0, 1), (2,)),)})
    cost = LayerCost(*(Quadratic(a=1.0) for _ in range(4)))
    model = ModelSpec((UnitSpec("language", (LayerSpec("l", "block", 0),)),))
    table = stage_costs(plan, model, CostModel("synthetic", "synthetic", "float32", {"block": {ONE: cost}}))
    schedule, tokens = one_f_one_b(plan, assignment), {"language": [3, 4, 5]}
    assert predict(plan, assignment, schedule, table, tokens).seconds == 2 * (3**2 + 4**2 + 5**2)
    # One sample alone in its row runs as it was measured.
    dense = predict(plan, assignment, schedule, table, tokens, dense={"language": DenseRows.always(2.0)})
    assert dense.seconds == 2 * (2 * (3 + 4) ** 2 + 5**2)
    by_length = {"language": DenseRows((5.0, 9.0), (1.0, 2.0))}
    grown = predict(plan, assignment, schedule, table, tokens, dense=by_length)
    assert grown.seconds == 2 * (1.5 * (3 + 4) ** 2 + 5**2)  # seven tokens are half way from five to nine
    # The planners' mean microbatch is the mean over all pairs that may meet.
    workload = Workload({"language": np.array([3.0, 5.0])}, dense={"language": DenseRows.always(2.0)})
    met = [2 * (a + b) ** 2 for a in (3, 5) for b in (3, 5)]
    assert workload.mean_row("language", 2)[0] == pytest.approx(sum(met) / len(met))


def test_several_images_of_a_sample_can_bring_their_own_squares():
    plan = Plan((UnitPlan("vision", (Replica((Stage(0, 1, (0,)),)),)),))
    assignment = Assignment({"vision": (((0, 1),),)})
    cost = LayerCost(*(Quadratic(a=1.0) for _ in range(4)))
    model = ModelSpec((UnitSpec("vision", (LayerSpec("v", "block", 0),)),))
    table = stage_costs(plan, model, CostModel("synthetic", "synthetic", "float32", {"block": {ONE: cost}}))
    schedule = one_f_one_b(plan, assignment)
    tokens = {"vision": [4, 6]}
    # Frozen-before-nothing: the first trainable layer's backward takes what first_trainable says, 1 per token squared.
    assert predict(plan, assignment, schedule, table, tokens).seconds == 2 * (16 + 36)
    images = {"vision": [2 * 2**2, 3 * 2**2]}
    assert predict(plan, assignment, schedule, table, tokens, squares=images).seconds == 2 * (8 + 12)


def test_a_stage_sends_what_its_last_layer_makes():
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 2, (0,)), Stage(2, 3, (1,)))),)),))
    sizes = {"wide": 80.0, "narrow": 2.0}
    layers = {
        name: {ONE: LayerCost(*[Quadratic(b=1.0)] * 4, output_bytes=Quadratic(b=size))} for name, size in sizes.items()
    }
    spec = tuple(LayerSpec(f"l{k}", kind, 1) for k, kind in enumerate(("wide", "narrow", "wide")))
    model = ModelSpec((UnitSpec("language", spec),))
    table = stage_costs(plan, model, CostModel("synthetic", "synthetic", "float32", layers))
    assert table.output_bytes.tolist() == [[0.0, 2.0, 0.0], [0.0, 80.0, 0.0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["1f1b", "zb-h1", "zb-h2"]))
def test_what_a_forward_allocates_its_backward_frees_once(seed, family):
    """Whole, or in halves of which the second frees what weight gradients kept."""
    rng, step = np.random.default_rng(seed), random_step(seed)
    count = len(step.plan.stages())
    shapes = (4, 3), (3,), (3,), (3,), (3,), (3,), (), ()
    late = np.zeros((count, 2, 3))
    costs = StageCosts(
        *(rng.random((count, *shape)) for shape in shapes[:-1]),
        *np.zeros((3, count)),
        late_bytes=late,
        items_per_token=np.ones(count),
        host_seconds=np.zeros((count, 4)),
        shard_bytes=late,
        gather_seconds=np.zeros((count, 2)),
    )
    graph = build(step.plan, step.assignment, FAMILIES[family](step.plan, step.assignment, step.trainability))
    samples = Workload({unit.name: rng.integers(1, 30, 16) for unit in step.plan.units})
    sums = op_sums(graph, costs, piece_sums(graph, samples), samples)
    message = message_bytes(graph, costs, message_sums(graph, samples))
    size = step_bytes(graph, costs, sums, message)
    balance = np.zeros((count, len(graph.packed.pieces.microbatch)))
    np.add.at(balance, (graph.stage, graph.piece), size.allocate - size.release)
    np.testing.assert_allclose(balance, 0.0, atol=1e-9)  # sums of doubles below 1e4
    halves = graph.kind == 3  # an input half may take: it recomputes what its weight half needs
    assert (size.release[halves] >= 0).all()
    assert halves.any() == (family != "1f1b" and any(step.trainability.weight_gradient))
