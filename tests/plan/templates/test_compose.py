"""Compositions of pipelines equal the best of an enumeration of all, and exist where they are guaranteed to."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.plan import BatchError, PlanError, Template, TooFewDevicesError, compose_pipelines, share_microbatches
from dilatant.plan.templates.templates import most_nodes
from oracles.compose import best_composition, slowest


def random_templates(draw, sizes, planned):
    integral = draw.random() < 0.5
    templates = {}
    for size in sizes:
        bottleneck = draw.randint(1, 20) if integral else draw.random()
        fill = draw.randint(0, 40) if integral else 3 * draw.random()
        templates[size] = Template((), fill + bottleneck * planned, bottleneck, num_microbatches=planned)
    return templates


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_slowest_pipeline_is_as_fast_as_any_composition_allows(seed):
    draw = random.Random(seed)
    smallest = draw.randint(1, 4)
    sizes = range(smallest, smallest + draw.randint(1, 5))
    if draw.random() < 0.4:
        sizes = sorted(draw.sample(range(1, 9), draw.randint(1, 5)))
    nodes, faults, microbatches = draw.randint(1, 13), draw.randint(0, 3), draw.randint(1, 20)
    planned = draw.choice([1, 4, microbatches])
    templates = random_templates(draw, sizes, planned)

    def finish(size, count):
        return templates[size].seconds + (count - planned) * templates[size].bottleneck

    expected = best_composition(sizes, nodes, faults + 1, microbatches, finish)
    if expected == float("inf"):
        with pytest.raises(PlanError):
            compose_pipelines(templates, nodes, faults, microbatches)
        return
    found = compose_pipelines(templates, nodes, faults, microbatches)
    assert found.seconds == expected == max(finish(*pipeline) for pipeline in found.pipelines)
    assert sum(size for size, _ in found.pipelines) == nodes
    assert sum(count for _, count in found.pipelines) == microbatches
    assert min(count for _, count in found.pipelines) >= 1
    assert len(found.pipelines) >= faults + 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_microbatches_are_shared_for_the_least_makespan(seed):
    draw = random.Random(seed)
    planned = draw.randint(1, 8)
    templates = random_templates(draw, range(1, 5), planned)
    pipelines = [draw.randint(1, 4) for _ in range(draw.randint(1, 6))]
    microbatches = draw.randint(len(pipelines), 24)
    counts, seconds = share_microbatches([templates[size] for size in pipelines], microbatches)
    assert sum(counts) == microbatches
    assert min(counts) >= 1
    assert seconds == slowest(
        pipelines,
        microbatches,
        lambda size, count: templates[size].seconds + (count - planned) * templates[size].bottleneck,
    )


def test_template_seconds_cover_the_batch_without_planned_count():
    templates = {1: Template((), 10.0, 0.1), 2: Template((), 8.0, 0.5)}
    found = compose_pipelines(templates, 3, 0, 6)
    assert found.pipelines == ((2, 5), (1, 1))
    assert found.seconds == 10.0 + (1 - 6) * 0.1


def test_an_unspreadable_batch_is_refused_with_the_nearest_size():
    templates = {2: Template((), 5.0, 1.0, num_microbatches=1), 3: Template((), 4.0, 1.0, num_microbatches=1)}
    with pytest.raises(BatchError, match="nearest batch that can has 4 microbatches") as caught:
        compose_pipelines(templates, 10, 1, 3)
    assert caught.value.nearest == (4,)
    assert len(compose_pipelines(templates, 10, 1, 4).pipelines) == 4


def test_clusters_that_cannot_be_used_are_refused_with_a_way_out():
    templates = {4: Template((), 5.0, 1.0), 6: Template((), 4.0, 1.0)}
    with pytest.raises(TooFewDevicesError, match="at least 8 are needed"):
        compose_pipelines(templates, 7, 1, 8)
    with pytest.raises(PlanError, match="nearest usable cluster has 10 or 12 nodes"):
        compose_pipelines(templates, 11, 1, 8)


def consecutive(counts):
    return {n: Template((), 1.0 / n, 1.0 / n, num_microbatches=1) for n in counts}


@pytest.mark.parametrize(
    "num_nodes", [*range(1, 25), *(pytest.param(nodes, marks=pytest.mark.slow) for nodes in range(25, 41))]
)
def test_every_cluster_down_to_the_guarantee_has_a_composition(num_nodes):
    """Check Theorem 1 of App. A with the number of replicas that its proof omits, and Theorem 2 with >=."""
    for smallest in range(1, num_nodes + 1):
        for faults in range(num_nodes // smallest):
            counts = range(smallest, num_nodes - faults * smallest + 1)
            templates = consecutive(counts)
            for left in range((faults + 1) * smallest, num_nodes + 1):
                found = compose_pipelines(templates, left, faults, left)
                assert len(found.pipelines) >= faults + 1
                assert sum(size for size, _ in found.pipelines) == left
            if num_nodes >= (faults + 2) * smallest:
                # Merging pipelines of less than `smallest` nodes until there are enough gives fewer than twice.
                assert set(range(smallest, 2 * smallest)) <= set(counts)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(1, 9), max_size=5), st.integers(0, 30), st.integers(0, 6))
def test_no_more_nodes_can_be_used_than_are(sizes, nodes, pipelines):
    reached = {(0, 0)}  # nodes and pipelines
    for _ in range(nodes):
        reached |= {(used + size, count + 1) for used, count in reached for size in sizes if used + size <= nodes}
    expected = max((used for used, count in reached if count >= max(1, pipelines)), default=0)
    assert most_nodes(sizes, nodes, pipelines) == expected
