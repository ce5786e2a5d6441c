"""The microbatch policies of DistTrain and Entrain: their rules, and that they run as policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.disttrain.order import disttrain, inter_reorder, order_search
from dilatant.schedule.assignment.assign import assign_microbatches
from dilatant.schedule.assignment.entrain import (
    closest_sums,
    effective_microbatches,
    entrain,
    entrain_microbatches,
    least_cost_matching,
    pairs_within,
    reachable_sums,
)
from dilatant.schedule.assignment.joint_search import step_model
from dilatant.schedule.assignment.pipeline_shape import PipelineShape, default_shape, shape_seconds
from dilatant.schedule.families import interleaved
from dilatant.schedule.families.families import one_f_one_b
from oracles import microbatches as oracle

SMALL = st.integers(0, 2**32 - 1)


def vlm(samples: int, seed: int) -> np.ndarray:
    """Vision and text tokens of a vision-language data set, as relative seconds of encoder and language model."""
    rng = np.random.default_rng(seed)
    vision, text = np.exp(rng.normal(6.5, 0.8, samples)), np.exp(rng.normal(5.3, 1.0, samples))
    tokens = vision / 4 + text
    cost = np.stack([vision * (1 + vision / 8e3), tokens * (1 + tokens / 16e3)], axis=1)
    return cost / cost.sum(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [disttrain, entrain])
@settings(max_examples=20, deadline=None)
@given(seed=SMALL)
def test_every_sample_is_once_in_every_unit_within_the_capacity(seed, policy):
    rng = np.random.default_rng(seed)
    seconds, weight = rng.lognormal(0, 1, (int(rng.integers(1, 40)), 2)), rng.integers(1, 20, 40)
    limit = {"weight": weight[: len(seconds)], "capacity": 30}
    found = assign_microbatches(seconds, 8, policy, seed, **limit)
    for batches in found:
        assert sorted(sample for batch in batches for sample in batch) == list(range(len(seconds)))
    assert all(weight[list(batch)].sum() <= 30 for batch in found[1])


# --- DistTrain


@settings(max_examples=30, deadline=None)
@given(SMALL, st.integers(1, 3), st.integers(1, 30))
def test_inter_reorder_puts_smallest_first_and_next_ones_last(seed, num_stages, count):
    rng = np.random.default_rng(seed)
    load = rng.lognormal(0, 1, (2, count))
    order = inter_reorder(default_shape(2, num_stages), load)
    assert sorted(order.tolist()) == list(range(count))
    depth = 2 * num_stages
    if count >= 2 * depth - 1:
        by_size = np.argsort(load.sum(axis=0)).tolist()
        assert order[0] == by_size[0]
        assert set(order[count - depth + 1 :].tolist()) == set(by_size[1:depth])


def test_reordering_shortens_the_step_and_order_search_even_more():
    random, ordered, searched = [], [], []
    shape = PipelineShape((4, 4), ((1,), ()), (2.0, 2.0), (0.0, 0.0), family=one_f_one_b)
    for seed in range(8):
        seconds = vlm(128, seed)
        slots = assign_microbatches(seconds, 32, "random", seed)[0]
        load = np.stack([[seconds[list(batch), unit].sum() for batch in slots] for unit in (0, 1)])
        model = step_model(shape, 32)
        random.append(model.seconds(load))
        ordered.append(model.seconds(load[:, inter_reorder(shape, load)]))
        searched.append(model.seconds(load[:, order_search(shape, load, 2000, seed)]))
    assert np.mean(ordered) < 0.97 * np.mean(random)
    # DistTrain's bar on plain 1F1B: 20 % below a random order.
    assert np.mean(searched) < 0.8 * np.mean(random)


def rounds(draw) -> PipelineShape:
    """An interleaved language model behind encoders that may be frozen, interleaved too, or absent."""
    groups, chunks = int(draw.integers(1, 5)), int(draw.integers(2, 5))
    before, own = int(draw.integers(0, 3)), int(draw.choice([1, 2]))
    language = tuple(range(before, before + groups)) * chunks
    if not before:
        return PipelineShape((len(language),), ((),), (2.0,), (0.0,), family=interleaved, ranks=language)
    vision = tuple(range(before)) * own
    ratio = float(draw.choice([0.0, 1.0, 2.0]))
    stages = len(vision), len(language)
    return PipelineShape(stages, ((1,), ()), (ratio, 2.0), (0.0, 0.0), family=interleaved, ranks=vision + language)


@settings(max_examples=60, deadline=None)
@given(SMALL, st.integers(1, 30))
def test_interleaved_order_is_complete_and_starts_with_smallest(seed, count):
    draw = np.random.default_rng(seed)
    shape = rounds(draw)
    load = draw.lognormal(0, 1, (shape.num_units, count))
    order = inter_reorder(shape, load, interleave=True)
    assert sorted(order.tolist()) == list(range(count))
    if count >= 5 * sum(shape.stages):
        assert order[0] == np.argmin(np.asarray(shape.stages) @ load)


@settings(max_examples=40, deadline=None)
@given(SMALL, st.integers(1, 24), st.booleans())
def test_reordering_never_makes_the_step_longer(seed, count, round_trips):
    draw = np.random.default_rng(seed)
    shape = rounds(draw) if round_trips else default_shape(2, int(draw.integers(1, 4)))
    seconds = draw.lognormal(0, 1, (int(draw.integers(1, 60)), shape.num_units))
    reordered = assign_microbatches(seconds, count, disttrain, seed, shape=shape)
    unordered = assign_microbatches(seconds, count, "random", seed, shape=shape)
    before = shape_seconds(shape, seconds, unordered)
    assert shape_seconds(shape, seconds, reordered) <= before * (1 + 1e-12)


def test_reordering_shortens_interleaved_steps():
    gains = []
    shape = PipelineShape((16,), ((),), (2.0,), (0.0,), family=interleaved, ranks=(0, 1, 2, 3) * 4)
    for seed in range(6):
        load = np.random.default_rng(seed).lognormal(0, 0.6, (32, 1))
        reordered = assign_microbatches(load, 32, disttrain, seed, shape=shape)
        unordered = assign_microbatches(load, 32, "random", seed, shape=shape)
        gains.append(shape_seconds(shape, load, reordered) / shape_seconds(shape, load, unordered))
    assert np.mean(gains) < 0.95


# --- Entrain


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.floats(0.01, 1.0))
def test_the_subset_nearest_to_the_target_is_found(values, share):
    units = np.asarray(values, dtype=np.int64)
    target = share * sum(values)
    last = reachable_sums(units, int(units.sum()))
    nearest, moved = closest_sums(last, units, units.astype(float), np.asarray([target]))
    expected = oracle.closest_subset_sum([float(v) for v in values], target)
    assert abs(moved[0] - target) == pytest.approx(abs(expected - target))
    assert nearest[0] == moved[0]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), SMALL)
def test_matchings_equal_brute_force(count, seed):
    rng = np.random.default_rng(seed)
    after, own = rng.integers(0, 20, (count, count)).astype(float), rng.integers(0, 20, count).astype(float)
    values = np.unique(np.concatenate([after.ravel(), own]))
    feasible = [v for v in values if pairs_within(after, own, v)]
    # A row that hands nothing over needs no column of its own, but every row ends up with some partner.
    assert feasible[0] == oracle.least_bottleneck(after.tolist(), own.tolist(), float("-inf"))
    cost = rng.random((count, count))
    column = least_cost_matching(cost)
    assert sorted(column.tolist()) == list(range(count))
    assert cost[np.arange(count), column].sum() == pytest.approx(oracle.least_cost(cost.tolist()))


@settings(max_examples=60, deadline=None)
@given(SMALL)
def test_deferral_uses_only_next_microbatch_and_shortens_longest(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    encoder, language = rng.lognormal(0, 1, (2, int(rng.integers(1, 60))))
    encoders, languages = entrain_microbatches(encoder, language, count)
    for place, (own, run) in enumerate(zip(encoders, languages, strict=True)):
        following = set(languages[place + 1]) if place + 1 < count else set()
        assert set(own) - set(run) <= following
    before = max(language[list(batch)].sum() for batch in encoders)
    after = max(language[list(batch)].sum() for batch in languages)
    assert after <= before + 1e-9
    if count % 2:
        assert encoders[-1] == languages[-1]
        loads = sorted(language[list(batch)].sum() for batch in encoders)
        assert language[list(encoders[-1])].sum() == pytest.approx(loads[count // 2])


def test_deferral_balances_language_loads_of_the_thesis_figure():
    # Encoder 3 units per microbatch; language loads spread, to be balanced by handing samples over (Fig. 4.8).
    seconds = vlm(512, seed=3)
    encoders, languages = entrain_microbatches(seconds[:, 0], seconds[:, 1], 32)
    spread = [np.std([seconds[list(b), 1].sum() for b in batches]) for batches in (encoders, languages)]
    assert spread[1] < 0.6 * spread[0]


def test_longest_sample_limits_effective_microbatches():
    assert effective_microbatches(np.asarray([4.0, 2.0, 2.0]), 8) == 2
    assert effective_microbatches(np.asarray([1.0] * 9), 8) == 8
    assert effective_microbatches(np.zeros(3), 8) == 8


def test_entrain_uses_fewer_microbatches_where_that_is_faster():
    rng = np.random.default_rng(5)
    samples, asked = int(rng.integers(8, 40)), int(rng.integers(4, 20))
    spread = rng.uniform(0.2, 2.0)
    seconds = np.stack([rng.lognormal(0, spread, samples), rng.lognormal(0, 0.5, samples)], axis=1)
    fewer = effective_microbatches(seconds[:, 0], asked)
    assert fewer < asked
    found = assign_microbatches(seconds, asked, entrain)
    assert sum(bool(batch) for batch in found[0]) == fewer
    all_asked = entrain_microbatches(seconds[:, 0], seconds[:, 1], asked)
    assert shape_seconds(default_shape(2), seconds, found) < shape_seconds(default_shape(2), seconds, all_asked)
