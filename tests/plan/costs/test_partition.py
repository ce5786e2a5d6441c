"""Contiguous partitions: the smallest bottleneck, with and without memory limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.plan import PlanError, partition_layers, partition_layers_in_memory
from dilatant.plan.costs.partition import missing_bytes
from oracles.partition import best_bottleneck

integers = st.lists(st.integers(0, 50), min_size=1, max_size=14)
reals = st.lists(st.floats(0.0, 10.0, allow_subnormal=False), min_size=1, max_size=14)


def stages(cuts, layers):
    return list(zip(cuts, (*cuts[1:], layers)))


@settings(max_examples=100, deadline=None)
@given(integers, st.integers(1, 14))
def test_the_bottleneck_is_the_smallest_possible(costs, num_stages):
    num_stages = min(num_stages, len(costs))
    cuts = partition_layers(costs, num_stages)
    assert len(cuts) == num_stages
    assert cuts[0] == 0
    assert all(first < end for first, end in stages(cuts, len(costs)))
    assert max(sum(costs[a:b]) for a, b in stages(cuts, len(costs))) == best_bottleneck(costs, num_stages)


@settings(max_examples=80, deadline=None)
@given(reals, st.integers(1, 14))
def test_real_costs_reach_the_optimum_up_to_rounding(costs, num_stages):
    num_stages = min(num_stages, len(costs))
    cuts = partition_layers(np.array(costs), num_stages)
    slowest = max(sum(costs[a:b]) for a, b in stages(cuts, len(costs)))
    # Prefix sums of at most 14 numbers below 10 are off by at most 14 roundings of 2**-46 each.
    assert slowest <= best_bottleneck(costs, num_stages) + 1e-12


def test_equal_layers_spread_evenly_within_the_bottleneck():
    # Five layers of cost 1 in three stages: the bottleneck 2 allows 2+2+1 or 1+2+2 but also 2+1+2.
    sizes = [b - a for a, b in stages(partition_layers([1] * 9, 4), 9)]
    assert sorted(sizes) == [2, 2, 2, 3]


def test_a_frozen_half_gets_fewer_stages():
    forward_only, trained = [1.0] * 8, [3.0] * 8
    cuts = partition_layers(forward_only + trained, 4)
    assert sum(cut < 8 for cut in cuts) == 1, "eight frozen layers weigh as much as 2.7 trained ones"


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_under_memory_the_bottleneck_is_the_smallest_that_fits(data):
    layers = data.draw(st.integers(1, 9))
    num_stages = data.draw(st.integers(1, layers))
    column = st.lists(st.integers(0, 9), min_size=layers, max_size=layers)
    costs, state, activation = data.draw(column), data.draw(column), data.draw(column)
    in_flight = [num_stages - stage for stage in range(num_stages)]
    capacity = data.draw(st.integers(0, 60))

    def fits(stage, first, end):
        return sum(state[first:end]) + in_flight[stage] * sum(activation[first:end]) <= capacity

    expected = best_bottleneck(costs, num_stages, fits)
    if expected == math.inf:
        assert partition_layers_in_memory(costs, state, activation, in_flight, capacity) is None
        enough = capacity + missing_bytes(state, activation, in_flight, capacity) * (1 + 1e-9)
        assert enough > capacity

        def fits_with_more(stage, first, end):
            return sum(state[first:end]) + in_flight[stage] * sum(activation[first:end]) <= enough

        assert best_bottleneck(costs, num_stages, fits_with_more) < math.inf
        return
    cuts = partition_layers_in_memory(costs, state, activation, in_flight, capacity)
    chosen = stages(cuts, layers)
    assert all(fits(stage, a, b) for stage, (a, b) in enumerate(chosen))
    assert max(sum(costs[a:b]) for a, b in chosen) == expected


def test_an_impossible_cut_says_what_is_missing():
    with pytest.raises(PlanError, match="3 layers cannot be cut into 4 stages"):
        partition_layers([1, 2, 3], 4)
    with pytest.raises(PlanError, match=r"layers \[1\]"):
        partition_layers([1.0, math.nan, 3.0], 2)
    gib = 2.0**30
    assert missing_bytes([1.5 * gib] * 2, [0, 0], [2, 1], gib) == pytest.approx(0.5 * gib)


def test_equally_good_cuts_resolve_to_the_most_even_one():
    # The last layer alone is the slowest stage; the other two stages could share the rest in any way.
    assert tuple(partition_layers([1.0] * 6 + [6.0], 3)) == (0, 4, 6)
    # A third of 11 lies between 3 and 4.
    assert tuple(partition_layers([1.0] * 5 + [6.0], 3)) == (0, 4, 5)
