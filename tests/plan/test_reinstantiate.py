"""Reinstantiation: every survivor works, every layer arrives, and nothing is copied needlessly."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.plan import (
    PlanError,
    TooFewDevicesError,
    compose_pipelines,
    plan_templates,
    reinstantiate,
)
from oracles.reinstantiate import fewest_bytes, held_layers

LAYERS = 6


def templates_for(sizes, gpus_per_node=1, microbatches=16):
    seconds = {d: [3.0 / d + 0.2 * k for k in range(LAYERS)] for d in range(1, gpus_per_node + 1)}
    return plan_templates(seconds, sizes, gpus_per_node, microbatches)


def number(composition):
    """Pipelines of consecutive node ids for a composition's sizes."""
    following = itertools.count()
    return [tuple(next(following) for _ in range(size)) for size, _ in composition]


def layers_by_node(templates, pipelines):
    return {
        node: layers
        for nodes in pipelines
        for node, layers in zip(nodes, held_layers(templates[len(nodes)].stages, len(nodes)))
    }


def lost_layers(found):
    """Layers that no surviving node holds."""
    return tuple(sorted({copy.layer for copy in found.copies if copy.source is None}))


def check(templates, before, lost, joined, found, microbatches, faults):
    """The result uses every node once and its copies complete what nodes hold, from nodes that hold it."""
    old = {n: layers for n, layers in layers_by_node(templates, before).items() if n not in lost}
    now = [pipeline.nodes for pipeline in found.pipelines]
    assert sorted(node for nodes in now for node in nodes) == sorted([*old, *joined])
    assert len(now) >= faults + 1
    assert sum(pipeline.microbatches for pipeline in found.pipelines) == microbatches
    wanted = layers_by_node(templates, now)
    received = {node: set() for node in wanted}
    for copy in found.copies:
        assert copy.source is None or copy.layer in old[copy.source]
        assert copy.layer not in received[copy.target]
        received[copy.target].add(copy.layer)
    for node, layers in wanted.items():
        assert received[node] == layers - old.get(node, set())
    missing = set(range(LAYERS)) - set().union(set(), *old.values())
    assert set(lost_layers(found)) == missing


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_other_placement_moves_fewer_bytes(seed):
    draw = random.Random(seed)
    templates = templates_for(range(draw.choice([1, 2]), 6), draw.choice([1, 2]))
    nodes, faults, microbatches = draw.randint(4, 8), draw.choice([0, 1]), draw.randint(8, 16)
    before = number(compose_pipelines(templates, nodes, faults, microbatches).pipelines)
    lost = draw.sample(range(nodes), draw.randint(max(1, nodes - 6), nodes - 3))
    joined = [100 + k for k in range(draw.randint(0, max(0, 6 - nodes + len(lost))))]
    if nodes - len(lost) + len(joined) < (faults + 1) * min(templates):
        return
    slack = draw.choice([0.0, 0.3, 1.0])
    layer_bytes = [draw.randint(1, 9) for _ in range(LAYERS)]
    found = reinstantiate(
        templates, before, lost, faults, microbatches, layer_bytes, joined, slack, budget=10_000
    )
    check(templates, before, set(lost), joined, found, microbatches, faults)
    held = [layers for node, layers in layers_by_node(templates, before).items() if node not in lost]
    held += [set() for _ in joined]
    limit = found.lower_bound * (1 + slack)
    assert found.seconds <= limit
    assert found.fewest_bytes
    expected = fewest_bytes(templates, held, faults + 1, microbatches, layer_bytes, limit)
    assert found.moved_bytes == expected


@pytest.mark.parametrize(("nodes", "smallest", "faults"), [(7, 1, 1), (8, 2, 1), (9, 2, 2), (9, 3, 1)])
def test_every_loss_that_leaves_enough_nodes_is_survived(nodes, smallest, faults):
    templates = templates_for(range(smallest, min(nodes - faults * smallest, LAYERS) + 1))
    before = number(compose_pipelines(templates, nodes, faults, 12).pipelines)
    for count in range(1, nodes + 1):
        for lost in itertools.combinations(range(nodes), count):
            if nodes - count < (faults + 1) * smallest:
                with pytest.raises(TooFewDevicesError):
                    reinstantiate(templates, before, lost, faults, 12)
                break
            found = reinstantiate(templates, before, lost, faults, 12)
            check(templates, before, set(lost), [], found, 12, faults)
            if count <= faults:
                assert not lost_layers(found), "as many losses as tolerated leave a replica whole"


def origins(found, before, lost=()):
    """Where each pipeline's nodes are from: see the cases."""
    home = {node: nodes for nodes in before for node in nodes if node not in lost}

    def origin(nodes):
        homes = {home.get(node) for node in nodes}
        if None in homes:
            return "join"
        if len(homes) > 1:
            whole = all(node in nodes for one in homes for node in one if node in home)
            return "merge" if whole else "borrow"
        return "kept" if nodes in homes else "simple"

    return sorted(origin(pipeline.nodes) for pipeline in found.pipelines)


def test_a_smaller_template_replaces_a_pipeline_after_a_loss():
    before = [(0, 1, 2, 3), (4, 5, 6)]
    found = reinstantiate(templates_for([2, 3, 4]), before, [3], 1, 12, slack=1.0)
    assert origins(found, before, [3]) == ["kept", "simple"]
    assert {frozenset(pipeline.nodes) for pipeline in found.pipelines} == {
        frozenset({0, 1, 2}),
        frozenset({4, 5, 6}),
    }


def test_nodes_that_were_together_stay_together():
    before = [(0, 5, 2, 7), (4, 1, 6, 3)]
    found = reinstantiate(templates_for([3, 4]), before, [3, 7], 1, 12)
    assert origins(found, before, [3, 7]) == ["simple", "simple"]


def test_a_pipeline_that_is_too_small_borrows_a_node():
    before = [(0, 1), (2, 3, 4)]
    found = reinstantiate(templates_for([2, 3, 4]), before, [1], 1, 12)
    assert "borrow" in origins(found, before, [1])
    assert sorted(len(pipeline.nodes) for pipeline in found.pipelines) == [2, 2]


def test_pipelines_merge_when_nobody_can_lend():
    before = [(0, 1), (2, 3), (4, 5)]
    found = reinstantiate(templates_for([2, 3]), before, [1], 1, 12)
    assert origins(found, before, [1]) == ["kept", "merge"]


def test_a_joining_node_copies_layers_from_the_least_used_nodes():
    templates = templates_for([1, 2])
    found = reinstantiate(templates, [(0,), (1,)], [], 0, 9, joined=[7])
    check(templates, [(0,), (1,)], set(), [7], found, 9, 0)
    assert origins(found, [(0,), (1,)]) == ["join", "kept", "kept"]
    sent = [sum(copy.source == node for copy in found.copies) for node in (0, 1)]
    assert sent == [LAYERS // 2, LAYERS // 2]


def test_layers_without_a_holder_are_named():
    found = reinstantiate(templates_for([1, 2]), [(0, 1)], [1], 0, 8)
    assert lost_layers(found) == tuple(range(templates_for([2])[2].stages[0][1], LAYERS))
    assert all(copy.source is None for copy in found.copies)


def test_contradictions_are_listed_together():
    with pytest.raises(
        PlanError, match=r"\[1\] are in several.*lost nodes \[9\].*joined nodes \[2\].*\[3\] nodes"
    ):
        reinstantiate(templates_for([2]), [(0, 1), (1, 2, 3)], [9], 0, 8, joined=[2])


@pytest.mark.parametrize("seed", [0, 16, 17])
def test_more_slack_never_moves_more_bytes_than_none(seed):
    """Also where far more compositions are allowed than are compared: the fastest are among them."""
    draw = random.Random(seed)
    seconds = {1: [3.0 + 0.2 * k for k in range(32)]}
    templates = plan_templates(seconds, range(2, 17), 1, 64)
    before = number(compose_pipelines(templates, 256, 1, 1024).pipelines)
    lost = draw.sample(range(256), draw.randint(1, 80))
    none, some, much = (
        reinstantiate(templates, before, lost, 1, 1024, slack=slack) for slack in (0.0, 0.03, 0.1)
    )
    assert max(some.moved_bytes, much.moved_bytes) <= none.moved_bytes
