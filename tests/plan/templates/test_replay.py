"""Replays against a step-by-step oracle, the fault-tolerance guarantee, and published averages."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.oobleck.node_reactions import from_templates
from dilatant.plan.replay.node_trace import NodeEvent, NodeTrace, load_node_trace
from dilatant.plan.replay.replay import (
    COPYING,
    RECONFIGURING,
    RESTARTING,
    ROLLED_BACK,
    SAVING,
    TOO_FEW,
    UNFINISHED,
    RecoveryCosts,
    RunningPipelines,
    replay,
)
from dilatant.plan.templates.templates import plan_templates
from dilatant.planning.failures import compare_recovery, restart_from_checkpoint, without_cost
from oracles.stepwise_replay import stepwise_replay

ROOT = Path(__file__).resolve().parents[3]

SHARED = Path(os.environ.get("DILATANT_SHARED", ROOT.parent / "shared")) / "traces"
FREE = RecoveryCosts(reconfigure_seconds=0, restart_seconds=0, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def templates():
    return plan_templates({1: [0.05] * 12}, range(2, 13), 1, 24)


def scripted(layouts):
    """Return a reaction that returns the given states in turn, whatever nodes are alive."""
    following = iter(layouts)

    def react(running, alive):
        step, moved, kept, restarted = next(following)
        return RunningPipelines(((0,),) if math.isfinite(step) else (), step, moved, kept, restarted)

    return react


costs = st.builds(
    RecoveryCosts,
    reconfigure_seconds=st.sampled_from([0.0, 3.0, 7.5]),
    copy_bytes_per_second=st.just(1.0),
    restart_seconds=st.sampled_from([0.0, 20.0]),
    checkpoint_steps=st.integers(1, 7),
    checkpoint_seconds=st.sampled_from([0.0, 1.0, 4.0]),
    salvaged=st.sampled_from([0.0, 0.5, 1.0]),
)
OFF = 0.001234567  # keeps events off the ends of steps and checkpoints, where rounding decides who was first
running = st.tuples(
    st.sampled_from([0.7, 1.3, 5.0, math.inf]), st.sampled_from([0, 2, 9]), st.booleans(), st.booleans()
)


@settings(max_examples=60, deadline=None, print_blob=True)
@given(
    st.lists(st.tuples(st.floats(0.3, 60.0), st.booleans(), running), min_size=1, max_size=8),
    st.floats(0.0, 80.0),
    costs,
)
def test_replay_equals_one_step_after_the_other(changes, tail, costs):
    now, events, times = 0.0, [], []
    for number, (gap, is_loss, _) in enumerate(changes):
        now += gap + OFF if number else 0.0
        is_loss = is_loss and number > 0
        times.append((now, is_loss))
        events.append(NodeEvent(now, () if is_loss else (1000 + number,), (1000,) if is_loss else ()))
    tail += OFF
    trace = NodeTrace("random", tuple(events), now + tail)
    layouts = [entry for _, _, entry in changes]
    found = replay("x", trace, scripted(layouts), 1.0, costs)
    steps, rolled, lost = stepwise_replay(times, now + tail, layouts, costs)
    assert found.samples == pytest.approx(steps, abs=1e-6)
    assert sum(segment.samples for segment in found.segments) - found.samples == pytest.approx(rolled, abs=1e-6)
    recovery = sum(found.lost.get(cause, 0.0) for cause in (RECONFIGURING, COPYING, RESTARTING, SAVING))
    assert recovery == pytest.approx(lost["recovery"] + lost["saving"], abs=1e-6)  # saving ahead of a restart is both
    assert found.lost.get(UNFINISHED, 0.0) == pytest.approx(lost["unfinished"], abs=1e-6)
    assert found.lost.get(ROLLED_BACK, 0.0) == pytest.approx(lost["rolled back"], abs=1e-6)
    assert found.lost.get(TOO_FEW, 0.0) == pytest.approx(lost["stopped"], abs=1e-6)


def test_time_is_training_or_lost(templates):
    events = [NodeEvent(0.0, tuple(range(12)), ())]
    events += [NodeEvent(300.0 * (i + 1), (), (i,)) for i in range(7)]
    trace = NodeTrace("t", tuple(events), 4000.0)
    for reaction in (from_templates(templates, 2, 24), restart_from_checkpoint(templates, 24)):
        found = replay("x", trace, reaction, 24.0, RecoveryCosts())
        useful = found.seconds - sum(found.lost.values())
        assert 0.0 < useful < found.seconds
        assert sum(part.seconds for part in found.segments) == pytest.approx(found.seconds)


def test_what_pipelines_without_a_loss_had_done_is_kept():
    """By hand: steps of 100 s on three pipelines. At 250 s one pipeline is lost, and a third of 50 s with it. At 275 s
    another is lost, and half of the remaining 33.3 s and of the new 25 s with it (recovery takes no time)."""
    three = RunningPipelines(((0,), (1,), (2,)), 100.0)
    shrinking = {3: three, 2: RunningPipelines(((1,), (2,)), 100.0), 1: RunningPipelines(((2,),), 100.0)}
    events = (NodeEvent(0.0, (0, 1, 2), ()), NodeEvent(250.0, (), (0,)), NodeEvent(275.0, (), (1,)))
    costs = RecoveryCosts(0.0, math.inf, checkpoint_steps=1000, keeps_pipelines=True)
    found = replay("x", NodeTrace("t", events, 1000.0), lambda before, alive: shrinking[len(alive)], 1.0, costs)
    lost = 50.0 / 3 + (100.0 / 3 + 25.0) / 2
    assert found.lost[UNFINISHED] == pytest.approx(lost, rel=1e-6)  # a step's end has a tolerance of 1e-9
    assert found.samples == int((1000.0 - lost) / 100.0)


def test_microbatches_in_flight_are_computed_again():
    """By hand: steps of 100 s on two pipelines. At 250 s one is lost: of 50 s the last 8 are in flight, and half of the
    other 42 is lost, too. At 254 s the node that replaced it is lost: 4 s are in flight, and half of 21 s is lost. At
    the end of the trace, 8 s are in flight again."""
    two = RunningPipelines(((0,), (1,)), 100.0, in_flight_seconds=8.0)
    events = (NodeEvent(0.0, (0, 1, 2), ()), NodeEvent(250.0, (), (2,)), NodeEvent(254.0, (), (0,)))
    layouts = iter([RunningPipelines(((2,), (1,)), 100.0, in_flight_seconds=8.0), two, two])
    costs = RecoveryCosts(0.0, math.inf, checkpoint_steps=1000, keeps_pipelines=True)
    found = replay("x", NodeTrace("t", events, 1000.0), lambda before, alive: next(layouts), 1.0, costs)
    lost = 8.0 + 21.0 + 4.0 + 10.5 + 8.0
    assert found.lost[UNFINISHED] == pytest.approx(lost, rel=1e-6)  # a step's end has a tolerance of 1e-9
    assert found.samples == int((1000.0 - lost) / 100.0)


def test_one_microbatch_of_the_slowest_pipeline_is_in_flight(templates):
    running = from_templates(templates, 1, 24)(None, frozenset(range(12)))
    assert running.in_flight_seconds == pytest.approx(12 * 0.05)  # twelve layers in sequence


def test_up_to_f_losses_at_a_time_never_roll_back(templates):
    """Oobleck's guarantee (thesis 2.3): f + 1 replicas, so f losses leave every layer on some node."""
    import random

    for seed in range(12):
        draw = random.Random(seed)
        tolerance = 1 + seed % 3
        alive = list(range(12))
        events = [NodeEvent(0.0, tuple(alive), ())]
        while len(alive) - tolerance >= 2 * (tolerance + 1):
            lost = draw.sample(alive, draw.randint(1, tolerance))
            alive = [node for node in alive if node not in lost]
            events.append(NodeEvent(500.0 * len(events), (), tuple(sorted(lost))))
        trace = NodeTrace("f", tuple(events), 500.0 * len(events))
        found = replay("x", trace, from_templates(templates, tolerance, 24), 24.0, RecoveryCosts(), tolerance + 1)
        assert found.changes == len(events) - 1 > 0
        assert found.rollbacks == 0, seed
        assert found.exposed_seconds == 0.0, seed
        assert all(segment.replicas >= tolerance + 1 for segment in found.segments)


def test_losing_every_holder_of_a_layer_rolls_back(templates):
    reaction = from_templates(templates, 0, 24)
    first = reaction(None, frozenset(range(4)))
    gone = {nodes[0] for nodes in first.pipelines}  # the first stages of all pipelines
    after = reaction(first, frozenset(range(4)) - gone)
    assert not after.kept
    survivors = frozenset(range(4)) - {first.pipelines[0][0]}
    assert reaction(first, survivors).kept == (len(first.pipelines) > 1)


def test_templates_use_every_node_and_the_grid_does_not(templates):
    reaction, grid = from_templates(templates, 1, 24), restart_from_checkpoint(templates, 24)
    for count in range(4, 13):
        running = reaction(None, frozenset(range(count)))
        assert sorted(node for nodes in running.pipelines for node in nodes) == list(range(count))
        assert running.step_seconds <= grid(None, frozenset(range(count))).step_seconds * (1 + 1e-9)  # same arithmetic


def test_nodes_without_a_microbatch_stay_idle(templates):
    few = from_templates(templates, 1, 2)
    running = few(None, frozenset(range(40)))
    assert sum(len(nodes) for nodes in running.pipelines) == 24  # two pipelines of the largest template
    assert math.isfinite(few(running, frozenset(range(1, 40))).step_seconds)


def test_training_halts_below_one_replica_then_resumes(templates):
    events = (
        NodeEvent(0.0, tuple(range(4)), ()),
        NodeEvent(1000.0, (), (0, 1, 2)),
        NodeEvent(1500.0, (10, 11, 12), ()),
    )
    found = replay("x", NodeTrace("t", events, 3000.0), from_templates(templates, 1, 24), 24.0, RecoveryCosts(), 2)
    assert found.lost[TOO_FEW] == pytest.approx(500.0)
    assert found.lost[RESTARTING] == 60.0
    assert found.rollbacks == 1


def test_recovery_lies_between_restart_and_free_recovery(templates):
    events = [NodeEvent(0.0, tuple(range(12)), ())]
    events += [NodeEvent(200.0 * (i + 1), (), (i,)) for i in range(8)]
    reaction = from_templates(templates, 1, 24, [10**9] * 12)
    trace = NodeTrace("t", tuple(events), 2000.0)
    ours, restart, free = compare_recovery(trace, reaction, templates, (24, 96.0), RecoveryCosts(), 2)
    assert restart.samples < ours.samples < free.samples
    assert ours.lost[COPYING] > 0.0
    assert SAVING in restart.lost
    assert SAVING not in ours.lost
    assert sum(free.lost.values()) == pytest.approx(0.0, abs=1e-6)


def test_a_restart_pays_for_what_was_not_saved():
    events = (NodeEvent(0.0, (0, 1), ()), NodeEvent(95.0, (), (1,)))
    trace = NodeTrace("t", events, 200.0)
    reaction = scripted([(1.0, 0, True, True), (1.0, 0, True, True)])
    costs = RecoveryCosts(restart_seconds=10, checkpoint_steps=50, checkpoint_seconds=5)
    surprised = replay("x", trace, reaction, 1.0, costs)
    assert surprised.lost[ROLLED_BACK] == pytest.approx(40.0)  # 50 steps, a save, 40 steps


@pytest.mark.skipif(not SHARED.exists(), reason="the public traces are absent: published averages were not reproduced")
@pytest.mark.parametrize(
    ("model", "ec2", "gcp"),
    [
        ("BERT-large", 298.5, 278.9),
        ("GPT-2", 89.1, 82.3),
        ("GPT-3-medium", 30.8, 27.9),
        ("GPT-3-2.7b", 7.61, 7.04),
        ("GPT-3-6.7b", 4.51, 4.15),
    ],
)
def test_measured_rates_at_no_cost_give_the_published_ceilings(model, ec2, gcp):
    """Time averages of Oobleck's throughput by nodes over its two spot traces; tiny steps leave nothing unfinished."""
    table = json.loads((SHARED / "oobleck/throughput_by_nodes.json").read_text())["throughput_by_nodes"][model]
    rates = {int(nodes): rate for nodes, rate in table.items()}

    def step_seconds(nodes):
        rate = rates.get(min(nodes, 30), 0.0)
        return 0.001 / rate if rate else math.inf

    for name, expected in (("scale_p3-trace", ec2), ("scale_gcp-trace", gcp)):
        trace = load_node_trace(SHARED / f"oobleck/{name}.csv")

        def by_rate(before, alive, step_seconds=step_seconds):
            return RunningPipelines((tuple(sorted(alive)),), step_seconds(len(alive)))

        found = replay(model, trace, without_cost(by_rate), 0.001, FREE)
        # Published to three digits, over the time from 0 on, when no node is there yet.
        assert found.samples / trace.seconds == pytest.approx(expected, rel=2e-3)
