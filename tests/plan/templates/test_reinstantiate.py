"""Reinstantiation uses every surviving node, gives each its layers, and copies nothing needlessly."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.plan import TooFewDevicesError, compose_pipelines, plan_templates, reinstantiate
from dilatant.plan.templates.reinstantiate import node_layers
from dilatant.plan.templates.templates import share_microbatches
from oracles.reinstantiate import fewest_bytes, held_layers

LAYERS = 6


def templates_for(sizes, gpus_per_node=1, microbatches=16):
    seconds = {d: [3.0 / d + 0.2 * k for k in range(LAYERS)] for d in range(1, gpus_per_node + 1)}
    return plan_templates(seconds, sizes, gpus_per_node, microbatches)


def number(composition):
    """Return pipelines of consecutive node ids for a composition's sizes."""
    following = itertools.count()
    return [tuple(next(following) for _ in range(size)) for size, _ in composition]


def after(templates, before, lost, faults, microbatches, layer_bytes=None, joined=()):
    """Reinstantiate the pipelines `before` after nodes were lost and joined."""
    whole = [nodes for nodes in before if not {*nodes} & {*lost}]
    others = dict.fromkeys(joined, (0, 0))
    for nodes in before:
        if nodes not in whole:
            spans = zip(nodes, node_layers(templates[len(nodes)], len(nodes)))
            others |= {node: span for node, span in spans if node not in lost}
    return reinstantiate(templates, whole, others, faults, microbatches, layer_bytes)


def layers_by_node(templates, pipelines):
    return {
        node: layers
        for nodes in pipelines
        for node, layers in zip(nodes, held_layers(templates[len(nodes)].stages, len(nodes)))
    }


def lost_layers(found):
    """Return the layers that no surviving node holds."""
    return tuple(sorted({copy.layer for copy in found.copies if copy.source is None}))


def check(templates, before, lost, joined, found, faults):
    """Check that the result uses every node once, and that nodes which hold the missing layers send them."""
    old = {n: layers for n, layers in layers_by_node(templates, before).items() if n not in lost}
    now = found.pipelines
    assert sorted(node for nodes in now for node in nodes) == sorted([*old, *joined])
    assert len(now) >= faults + 1
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
    layer_bytes = [draw.randint(1, 9) for _ in range(LAYERS)]
    found = after(templates, before, lost, faults, microbatches, layer_bytes, joined)
    check(templates, before, set(lost), joined, found, faults)
    held = [layers for node, layers in layers_by_node(templates, before).items() if node not in lost]
    held += [set() for _ in joined]
    limit = compose_pipelines(templates, len(held), faults, microbatches).seconds
    own = [templates[len(nodes)] for nodes in found.pipelines]
    assert share_microbatches(own, microbatches)[1] <= limit
    expected = fewest_bytes(templates, held, faults + 1, microbatches, layer_bytes, limit)
    assert sum(copy.num_bytes for copy in found.copies) == expected


@pytest.mark.parametrize(("nodes", "smallest", "faults"), [(7, 1, 1), (8, 2, 1), (9, 2, 2), (9, 3, 1)])
def test_every_loss_that_leaves_enough_nodes_is_survived(nodes, smallest, faults):
    templates = templates_for(range(smallest, min(nodes - faults * smallest, LAYERS) + 1))
    before = number(compose_pipelines(templates, nodes, faults, 12).pipelines)
    for count in range(1, nodes + 1):
        for lost in itertools.combinations(range(nodes), count):
            if nodes - count < (faults + 1) * smallest:
                with pytest.raises(TooFewDevicesError):
                    after(templates, before, lost, faults, 12)
                break
            found = after(templates, before, lost, faults, 12)
            check(templates, before, set(lost), [], found, faults)
            if count <= faults:
                assert not lost_layers(found), "as many losses as tolerated leave a replica whole"


def origins(found, before, lost=()):
    """Return for each pipeline how its nodes came together: kept, simple, join, borrow or merge."""
    home = {node: nodes for nodes in before for node in nodes if node not in lost}

    def origin(nodes):
        homes = {home.get(node) for node in nodes}
        if None in homes:
            return "join"
        if len(homes) > 1:
            whole = all(node in nodes for one in homes for node in one if node in home)
            return "merge" if whole else "borrow"
        return "kept" if nodes in homes else "simple"

    return sorted(origin(nodes) for nodes in found.pipelines)


def test_a_smaller_template_replaces_a_pipeline_after_a_loss():
    before = [(0, 1, 2, 3), (4, 5, 6)]
    found = after(templates_for([3, 4]), before, [3], 1, 12)
    assert origins(found, before, [3]) == ["kept", "simple"]
    assert {*map(frozenset, found.pipelines)} == {frozenset({0, 1, 2}), frozenset({4, 5, 6})}


def test_a_pipeline_that_is_too_small_borrows_a_node():
    before = [(0, 1), (2, 3, 4)]
    found = after(templates_for([2, 3, 4]), before, [1], 1, 12)
    assert "borrow" in origins(found, before, [1])
    assert sorted(map(len, found.pipelines)) == [2, 2]


def test_pipelines_merge_when_nobody_can_lend():
    before = [(0, 1), (2, 3), (4, 5)]
    found = after(templates_for([2, 3]), before, [1], 1, 12)
    assert origins(found, before, [1]) == ["kept", "merge"]


def test_a_joining_node_copies_layers_from_the_least_used_nodes():
    templates = templates_for([1, 2])
    found = after(templates, [(0,), (1,)], [], 0, 9, joined=[7])
    check(templates, [(0,), (1,)], set(), [7], found, 0)
    assert origins(found, [(0,), (1,)]) == ["join", "kept", "kept"]
    sent = [sum(copy.source == node for copy in found.copies) for node in (0, 1)]
    assert sent == [LAYERS // 2, LAYERS // 2]


def test_layers_without_a_holder_are_named():
    found = after(templates_for([1, 2]), [(0, 1)], [1], 0, 8)
    assert lost_layers(found) == tuple(range(templates_for([2])[2].stages[0][1], LAYERS))
    assert all(copy.source is None for copy in found.copies)
