"""Pipeline templates against the enumeration of every pipeline."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.plan import LayerMemory, PlanError, plan_templates
from oracles.templates import best_pipeline, fits, pipeline_time

COSTS = {
    "uniform": lambda draw: draw.randint(1, 100),
    "identical": lambda draw: 7,
    "heavy-tailed": lambda draw: int(draw.paretovariate(0.8) * 10),
    "many ties": lambda draw: draw.randint(1, 3),
    "some free": lambda draw: draw.randint(0, 2),
}


def random_case(draw):
    """Draw a table of integer seconds, GPUs per node and microbatches, so small that three nodes can be enumerated."""
    node = draw.choice([1, 2, 3])
    layers = draw.randint(1, 6)
    widths = draw.sample(range(1, node + 1), draw.randint(1, node))
    cost = COSTS[draw.choice(sorted(COSTS))]
    base = [cost(draw) for _ in range(layers)]
    if draw.random() < 0.7:
        seconds = {d: [max(0, value * 12 // d + draw.randint(0, 2)) for value in base] for d in widths}
    else:
        seconds = {d: [cost(draw) for _ in range(layers)] for d in widths}
    memory = None
    if draw.random() < 0.4:
        memory = LayerMemory(
            {d: [draw.randint(1, 20) // d for _ in range(layers)] for d in widths},
            {d: [draw.randint(0, 6) // d for _ in range(layers)] for d in widths},
            draw.randint(10, 60),
        )
    return seconds, node, draw.choice([1, 2, 3, 5, 8, 16, 40]), memory


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_node_count_gets_the_best_of_all_its_pipelines(seed):
    seconds, node, microbatches, memory = random_case(random.Random(seed))
    templates = plan_templates(seconds, range(1, 4), node, microbatches, memory)
    for nodes in range(1, 4):
        expected = best_pipeline(seconds, nodes, node, microbatches, memory)
        assert (nodes in templates) == (expected is not None)
        if expected is None:
            continue
        found = templates[nodes]
        times = [sum(seconds[gpus][first:end]) for first, end, gpus in found.stages]
        assert found.seconds == expected == pipeline_time(times, microbatches)
        assert found.bottleneck == max(times)
        check_layout(found.stages, nodes, node, len(seconds[min(seconds)]))
        if memory is not None:
            cuts = [(first, end) for first, end, _ in found.stages]
            assert fits([gpus for _, _, gpus in found.stages], cuts, microbatches, memory)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_fewer_microbatches_than_stages_keep_to_the_definition(seed):
    draw = random.Random(seed)
    cost = COSTS[draw.choice(sorted(COSTS))]
    seconds = {1: [cost(draw) for _ in range(7)]}
    microbatches = draw.randint(1, 6)
    templates = plan_templates(seconds, range(3, 8), 1, microbatches)
    for nodes in range(3, 8):
        assert templates[nodes].seconds == best_pipeline(seconds, nodes, 1, microbatches)


def check_layout(stages, nodes, node, layers):
    assert [first for first, _, _ in stages] == [0, *[end for _, end, _ in stages[:-1]]]
    assert stages[-1][1] == layers
    used = 0
    for _, _, gpus in stages:
        assert used // node == (used + gpus - 1) // node, "a stage crosses a node"
        used += gpus
    assert used == nodes * node


def test_equally_slow_stages_count_as_the_longer_path():
    # Two stages of 5: with k* the last, T = 10 + (4 - 2 + 1 - 1) 5 + 5.
    assert plan_templates({1: [5, 5]}, [2], 1, 4)[2].seconds == 10 + 2 * 5 + 5


def test_node_counts_without_a_template_are_absent():
    templates = plan_templates({1: [1.0, 1.0, 1.0], 2: [0.6, 0.6, 0.6]}, [1, 2, 3, 4], 2, 8)
    assert sorted(templates) == [1, 2, 3], "four nodes need four stages, the model has three layers"
    assert plan_templates({2: [1.0]}, [1], 3, 4) == {}, "two GPUs a stage cannot use nodes of three"


def test_a_binding_memory_costs_time_and_a_loose_one_nothing():
    seconds = {1: [4, 1, 1, 1], 2: [2, 1, 1, 1]}
    free = plan_templates(seconds, [2], 2, 16)[2]
    state = {d: [10] * 4 for d in seconds}
    none = {d: [0] * 4 for d in seconds}
    loose = plan_templates(seconds, [2], 2, 16, LayerMemory(state, none, 40))[2]
    tight = plan_templates(seconds, [2], 2, 16, LayerMemory(state, none, 10))[2]
    assert loose == free
    assert len(tight.stages) == 4
    assert tight.seconds > free.seconds
    assert plan_templates(seconds, [2], 2, 16, LayerMemory(state, none, 9)) == {}


def test_all_problems_of_a_table_are_named_at_once():
    with pytest.raises(PlanError, match=r"at least one GPU.*at least one microbatch.*at least one node"):
        plan_templates({1: [1.0]}, [0], 0, 0)
    with pytest.raises(PlanError, match=r"describes \[1, 2\] layers"):
        plan_templates({1: [1.0], 2: [1.0, 2.0]}, [1], 2, 4)
    with pytest.raises(PlanError, match=r"layers \[1\] on 1 GPUs"):
        plan_templates({1: [1.0, -2.0]}, [1], 1, 4)
    with pytest.raises(PlanError, match="none fits a node of 2"):
        plan_templates({4: [1.0]}, [1], 2, 4)
