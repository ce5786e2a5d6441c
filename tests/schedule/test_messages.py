"""Messages: both ends of each directed edge derive the same messages."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.step_cases import random_step
from dilatant.plan import Plan, Replica, Stage, UnitPlan, Workload
from dilatant.schedule.dependencies import messages
from dilatant.schedule.families.families import eager, zero_bubble_h1
from dilatant.schedule.schedule import Assignment
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.predict import message_sums
from oracles.event_simulator import needs, samples_of


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_messages_are_exactly_the_rows_that_actions_need(seed):
    step = random_step(seed)
    schedule = zero_bubble_h1(step.plan, step.assignment, step.trainability)
    actions = list(dict.fromkeys(a for rank in schedule.actions for a in schedule.actions[rank]))
    expected = Counter(
        (
            source,
            action,
            frozenset(samples_of(step.plan, step.assignment, source))
            & frozenset(samples_of(step.plan, step.assignment, action)),
        )
        for action, sources in needs(step.plan, step.assignment, actions).items()
        for source in sources
    )
    found = messages(step.plan, step.assignment, schedule)
    assert expected == Counter((m.producer, m.consumer, frozenset(m.samples)) for sent in found.values() for m in sent)
    placed = step.plan.stages()
    for (source, target), sent in found.items():
        assert {(m.producer.stage, m.consumer.stage) for m in sent} == {(source, target)}
        order = {action: i for i, action in enumerate(schedule.actions[placed[source].stage.ranks[0]])}
        then = {action: i for i, action in enumerate(schedule.actions[placed[target].stage.ranks[0]])}
        positions = [(order[m.producer], then[m.consumer]) for m in sent]
        assert positions == sorted(positions)
        assert all(len(set(m.samples)) == len(m.samples) > 0 for m in sent)


def test_messages_of_the_worked_example():
    plan = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), ("language",)),
            UnitPlan("language", (Replica((Stage(0, 3, (1,)), Stage(3, 6, (2,)))),)),
        )
    )
    assignment = Assignment({"vision": (((0, 1), (2, 3, 5)),), "language": (((0, 4), (1, 2), (3, 5)),)})
    found = messages(plan, assignment, eager(plan, assignment))
    assert [(m.producer.samples, m.consumer.microbatch, m.samples) for m in found[0, 1]] == [
        ((0,), 0, (0,)),
        ((1,), 1, (1,)),
        ((2,), 1, (2,)),
        ((3, 5), 2, (3, 5)),
    ]
    assert [(m.producer.microbatch, m.consumer.samples, m.samples) for m in found[1, 0]] == [
        (0, (0,), (0,)),
        (1, (1,), (1,)),
        (1, (2,), (2,)),
        (2, (3, 5), (3, 5)),
    ]
    assert [m.samples for m in found[1, 2]] == [(0, 4), (1, 2), (3, 5)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_message_size_counts_producer_tokens_of_shared_samples(seed):
    rng = np.random.default_rng(seed)
    step = random_step(seed)
    graph = build(step.plan, step.assignment, eager(step.plan, step.assignment, step.trainability))
    tokens = {unit.name: rng.integers(0, 50, 16) for unit in step.plan.units}
    sums = message_sums(graph, Workload(tokens))
    placed = step.plan.stages()
    for number in range(graph.num_messages):
        source, target = (graph.action(int(ops[number])) for ops in (graph.edge_source, graph.edge_target))
        maker = placed[(source if source.kind == "F" else target).stage].unit
        shared = samples_of(step.plan, step.assignment, source) & samples_of(step.plan, step.assignment, target)
        sizes = [int(tokens[maker][sample]) for sample in shared]
        assert sums[number].tolist() == [sum(x * x for x in sizes), sum(sizes), float(sum(sizes) > 0)]
