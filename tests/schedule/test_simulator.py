"""The exact engine against an event-driven simulator that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.step_cases import random_order, random_step
from dilatant.plan import Cluster, Link, Plan, Replica, Stage, UnitPlan
from dilatant.plan.cluster import cluster_of_groups
from dilatant.schedule.families.families import eager, gpipe, one_f_one_b
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule
from dilatant.schedule.simulator.contention import travel
from dilatant.schedule.simulator.graph import ScheduleError, build
from dilatant.schedule.simulator.simulate import edge_lag, run, simulate, step_seconds
from oracles import event_simulator as oracle

FAMILIES = {"gpipe": gpipe, "1f1b": one_f_one_b, "eager": eager}


def random_schedule(step, rng) -> Schedule:
    name = rng.choice([*FAMILIES, "random", "split"])
    if name in FAMILIES:
        return FAMILIES[name](step.plan, step.assignment, step.trainability)
    schedule = eager(step.plan, step.assignment, step.trainability)
    actions = list(dict.fromkeys(a for rank in schedule.actions for a in schedule.actions[rank]))
    if name == "split":
        actions = [
            Action(kind, a.stage, a.microbatch, a.samples)
            for a in actions
            for kind in ((ActionKind.I, ActionKind.W) if a.kind == "B" and a.stage % 2 else (a.kind,))
        ]
    return random_order(step, actions, rng)


def message_times(graph, values):
    """Return (producer, consumer) → value of the message, as the oracle takes them."""
    pairs = zip(graph.edge_source[: graph.num_messages], graph.edge_target[: graph.num_messages], strict=True)
    return {(graph.action(s), graph.action(t)): float(v) for (s, t), v in zip(pairs, values, strict=True)}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_event_simulator_on_random_schedules(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    schedule = random_schedule(step, rng)
    graph = build(step.plan, step.assignment, schedule)
    seconds = {graph.action(op): float(rng.random()) for op in range(graph.num_ops)}
    lag = rng.random(graph.num_messages) * rng.integers(0, 3)
    timeline = simulate(schedule, step.plan, step.assignment, seconds.__getitem__, lag=lag)
    expected = oracle.simulate(step.plan, step.assignment, schedule, seconds, lag=message_times(graph, lag))
    assert timeline.seconds == expected.seconds
    for rank in schedule.actions:
        for action, start, end in timeline.of_rank(rank):
            assert (start, end) == (expected.start[action], expected.end[action])
    array = np.asarray([seconds[graph.action(op)] for op in range(graph.num_ops)])
    assert step_seconds(graph, array, edge_lag(graph, lag)) == expected.seconds


def turns_at_ports(step, cluster, size, shared):
    """Return the oracle's travel time of messages, which take turns at every rank's link and every node's ports; not
    `shared`: each message travels as if alone."""
    placed = step.plan.stages()
    free = {}

    def lag(producer, consumer, now):
        givers, takers = (placed[one.stage].stage.ranks for one in (producer, consumer))
        whole = size[producer, consumer]
        if givers == takers or not whole:
            return 0.0
        parts = max(len(givers), len(takers))
        passing, latency = {}, 0.0
        for part in range(parts):
            giver, taker = givers[part * len(givers) // parts], takers[part * len(takers) // parts]
            link = cluster.link(giver, taker)
            latency = max(latency, link.latency)
            if cluster.node_of(giver) == cluster.node_of(taker):
                ways = {("link out", giver): link.bandwidth, ("link in", taker): link.bandwidth}
            else:
                ways = {
                    (way, *cluster.place_of(rank)): cluster.at(rank).port.bandwidth
                    for way, rank in (("port out", giver), ("port in", taker))
                }
            for way, bandwidth in ways.items():
                passing[way] = passing.get(way, 0.0) + whole / parts / bandwidth
        there = now
        for way, seconds in passing.items():
            free[way] = max(now, free.get(way, 0.0) if shared else 0.0) + seconds
            there = max(there, free[way])
        gathered = 0.0
        if len(takers) > 1:
            inside = cluster.at(takers[0]).inside
            gathered = inside.latency + whole * (1 - 1 / len(takers)) / inside.bandwidth
        return there - now + latency + gathered

    return lag


def random_group(rng, devices=0):
    gpus = int(rng.integers(1, 5))
    bandwidths = (
        Link(float(rng.integers(1, 30)), float(rng.choice([0.01, 0.02]))),
        Link(float(rng.integers(1, 30)), float(rng.choice([0.1, 0.2]))),
    )
    return Cluster(max(1, -(-devices // gpus)), gpus, 1e12, *bandwidths, ports=int(rng.integers(1, gpus + 1)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_messages_take_turns_at_ports_as_in_the_event_simulator(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    schedule = random_schedule(step, rng)
    graph = build(step.plan, step.assignment, schedule)
    devices = max(step.plan.ranks) + 1
    groups = [random_group(rng, devices)]
    if rng.random() < 0.5:  # of unlike devices
        first = random_group(rng, int(rng.integers(1, devices + 1)))
        groups = [first, random_group(rng, devices - first.num_devices)]
    cluster = cluster_of_groups(groups)
    seconds = rng.random(graph.num_ops)
    size = rng.random(graph.num_messages) * rng.integers(0, 9, graph.num_messages)
    ends, lag = travel(graph, seconds, size, cluster)
    by_action = {graph.action(op): float(seconds[op]) for op in range(graph.num_ops)}
    sizes = message_times(graph, size)

    def played(shared):
        travels = turns_at_ports(step, cluster, sizes, shared)
        return oracle.simulate(step.plan, step.assignment, schedule, by_action, travels)

    together, alone = played(True), played(False)
    for op in range(graph.num_ops):
        assert ends[op] == pytest.approx(together.end[graph.action(op)], rel=1e-9)  # sums in another order
        assert ends[op] >= alone.end[graph.action(op)] * (1 - 1e-9)
    assert run(graph, seconds, lag=lag).seconds == pytest.approx(ends.max(), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_busy_and_idle_by_cause_fill_every_rank_exactly(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    graph = build(step.plan, step.assignment, random_schedule(step, rng))
    lag = rng.random(graph.num_messages)
    timeline = run(graph, rng.random(graph.num_ops), lag=lag)
    assert (timeline.idle >= 0).all()
    # Sums of up to a few hundred doubles below 10.
    np.testing.assert_allclose(timeline.busy + timeline.idle.sum(axis=1), timeline.seconds, rtol=1e-12)
    quiet = run(graph, rng.random(graph.num_ops))
    assert quiet.idle[:, quiet.causes.index("communication")].sum() == 0


def chain(stages: int, microbatches: int) -> tuple[Plan, Assignment]:
    plan = Plan((UnitPlan("language", (Replica(tuple(Stage(s, s + 1, (s,)) for s in range(stages))),)),))
    return plan, Assignment({"language": (tuple((k,) for k in range(microbatches)),)})


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_uniform_chain_has_the_textbook_time_and_bubble(family):
    plan, assignment = chain(4, 8)
    timeline = simulate(family(plan, assignment), plan, assignment, 1.0)
    assert timeline.seconds == 2 * (8 + 3)
    assert timeline.bubble == pytest.approx(3 / 11)
    assert {cause for cause, idle in timeline.idle_by_cause.items() if idle} == {"warm-up", "drain"}


def test_wait_for_slow_encoder_is_blamed_on_the_encoder():
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 1, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 1, (1,)), Stage(1, 2, (2,)))),)),
        )
    )
    batches = tuple((k,) for k in range(16))
    assignment = Assignment({"vision": (batches,), "language": (batches,)})
    timeline = simulate(eager(plan, assignment), plan, assignment, lambda action: 3.0 if action.stage == 0 else 1.0)
    idle = timeline.idle_by_cause
    assert idle["waiting for vision"] > 0.5 * sum(idle.values())
    assert idle["communication"] == idle["waiting for language"] == 0


def test_a_slow_link_is_named_as_communication():
    plan, assignment = chain(2, 8)
    timeline = simulate(one_f_one_b(plan, assignment), plan, assignment, 1.0, lag=2.0)
    assert timeline.idle_by_cause["communication"] > timeline.idle_by_cause["imbalance"]


def test_eager_hides_the_transfers_that_stall_1f1b():
    plan, assignment = chain(8, 64)
    seconds = [
        simulate(family(plan, assignment), plan, assignment, 1.0, lag=0.3).seconds for family in (one_f_one_b, eager)
    ]
    assert seconds[1] < 0.9 * seconds[0]


def test_a_deadlock_is_reported_with_its_cycle():
    plan, assignment = chain(2, 2)
    F, B = ActionKind.F, ActionKind.B
    schedule = Schedule(
        {
            0: (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
            1: (Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),
        }
    )
    with pytest.raises(ScheduleError, match=r"deadlock: .*stage 1 microbatch 1.* waits for .*stage 0") as raised:
        simulate(schedule, plan, assignment, 1.0)
    assert str(raised.value).count("waits for") == 2
