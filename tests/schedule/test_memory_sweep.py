"""The memory sweep against a plain replay, and against what 1F1B is known to hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.step_cases import random_step
from dilatant.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.costs.stage_costs import StageCosts
from dilatant.schedule.families.families import eager, one_f_one_b, zero_bubble_h1
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.predict import predict
from dilatant.schedule.simulator.simulate import StepBytes, run
from dilatant.schedule.trainability import trainability_of


def replay(graph, size, timeline, arrival):
    """The peak of every rank by looking at each moment at which anything changes."""
    placed = graph.plan.stages()
    start = {a: s for rank in timeline.ranks for a, s, _ in timeline.of_rank(rank)}
    end = {a: e for rank in timeline.ranks for a, _, e in timeline.of_rank(rank)}
    peaks = []
    for rank in timeline.ranks:
        moments = sorted({0.0, *start.values(), *end.values(), *arrival.tolist()})
        most = 0.0
        for now in moments:
            held = sum(size.static[p.index] for p in placed if rank in p.stage.ranks)
            for op in range(graph.num_ops):
                action = graph.action(op)
                if rank not in placed[action.stage].stage.ranks:
                    continue
                held += size.allocate[op] * (start[action] <= now) - size.release[op] * (end[action] <= now)
                held += size.transient[op] * (start[action] <= now < end[action])
            for number in range(graph.num_messages):
                source, target = (graph.action(int(o[number])) for o in (graph.edge_source, graph.edge_target))
                if rank in placed[source.stage].stage.ranks:
                    held += size.message[number] * (end[source] <= now < arrival[number])
                if rank in placed[target.stage].stage.ranks:
                    held += size.message[number] * (arrival[number] <= now < start[target])
            most = max(most, held)
        peaks.append(most)
    return peaks


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_a_plain_replay_of_every_moment(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    family = (one_f_one_b, zero_bubble_h1)[seed % 2]
    graph = build(step.plan, step.assignment, family(step.plan, step.assignment, step.trainability))
    size = StepBytes(
        rng.integers(0, 9, len(step.plan.stages())).astype(float),
        *(rng.integers(0, 9, graph.num_ops).astype(float) for _ in range(3)),
        rng.integers(0, 9, graph.num_messages).astype(float),
    )
    # Whole numbers, so that many things happen at the same moment.
    lag = rng.integers(0, 3, graph.num_messages).astype(float)
    timeline = run(graph, rng.integers(1, 4, graph.num_ops).astype(float), lag=lag, size=size)
    ends = {a: e for rank in timeline.ranks for a, _, e in timeline.of_rank(rank)}
    arrival = np.asarray([ends[graph.action(int(op))] for op in graph.edge_source[: graph.num_messages]]) + lag
    assert timeline.peak_bytes is not None
    assert timeline.peak_bytes.tolist() == replay(graph, size, timeline, arrival)


def unit_costs(stages: int) -> StageCosts:
    """One second and one byte of activations per token, ten bytes always held, nothing on the wire."""
    per_token = np.zeros((stages, 3))
    per_token[:, 1] = 1.0
    seconds = np.zeros((stages, 4, 3))
    seconds[:, :, 1] = [1.0, 2.0, 1.0, 1.0]
    none, late = np.zeros((stages, 3)), np.zeros((stages, 2, 3))
    always = np.full(stages, 10.0)
    return StageCosts(
        seconds,
        per_token,
        per_token / 2,
        none,
        none,
        none.copy(),
        always,
        *np.zeros((3, stages)),
        late_bytes=late,
        items_per_token=np.ones(stages),
        host_seconds=np.zeros((stages, 4)),
        shard_bytes=late,
        gather_seconds=np.zeros((stages, 2)),
    )


@pytest.mark.parametrize("stages", [1, 4])
def test_1f1b_holds_one_microbatch_per_stage_behind_it(stages):
    plan = Plan((UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s,)) for s in range(stages))),)),))
    assignment = Assignment({"language": (tuple((k,) for k in range(12)),)})
    tokens = {"language": [7] * 12}
    for family, held in ((one_f_one_b, lambda depth: depth), (eager, lambda depth: 2 * depth - 1)):
        timeline = predict(plan, assignment, family(plan, assignment), unit_costs(stages), tokens)
        assert timeline.peak_bytes is not None
        assert timeline.peak_bytes.tolist() == [10 + 7 * held(stages - s) for s in range(stages)]


def test_rows_of_frozen_encoder_take_memory_only_at_consumer():
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 1, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 1, (1,)),)),)),
        )
    )
    batches = (tuple((k,) for k in range(6)),)
    assignment = Assignment({"vision": batches, "language": batches})
    frozen = trainability_of(plan, {"vision": [False], "language": [True]})
    costs = unit_costs(2)
    costs.output_bytes[:, 1] = 1.0
    timeline = predict(
        plan, assignment, eager(plan, assignment, frozen), costs, {u: [1] * 6 for u in ("vision", "language")}
    )
    assert timeline.peak_bytes is not None
    # Encoder: 1 second each, all done at 6 s; language: 3 s each. At 6 s one runs and four wait.
    assert timeline.peak_bytes.tolist() == [10, 10 + 1 + 4]


def test_peak_memory_counts_gradients_and_their_sync_buffers():
    plan = Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)),)),)),))
    for count, gradient, summed, most in ((1, 4.0, 0.0, 6 + 7), (2, 4.0, 0.0, 10 + 7), (2, 0.0, 9.0, 10 + 7 + 9)):
        assignment = Assignment({"language": (tuple((k,) for k in range(count)),)})
        costs = replace(unit_costs(1), gradient_bytes=np.array([gradient]), sum_bytes=np.array([summed]))
        timeline = predict(plan, assignment, one_f_one_b(plan, assignment), costs, {"language": [7] * count})
        assert timeline.peak_bytes is not None
        assert timeline.peak_bytes.tolist() == [most]
