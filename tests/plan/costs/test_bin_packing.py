"""Packing fills rows within the budget, and needs hardly more of them than must be."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dilatant.plan.costs.workload import pack_rows


@settings(max_examples=300, deadline=None, print_blob=True)
@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 300))
def test_rows_hold_every_sample_once_within_the_budget(sizes, budget):
    rows = pack_rows(sizes, budget)
    assert sorted(position for row in rows for position in row) == list(range(len(sizes)))
    assert all(sum(sizes[position] for position in row) <= budget for row in rows)
    assert all(list(row) == sorted(row) for row in rows)
    assert list(rows) == sorted(rows)
    assert rows == pack_rows(sizes, budget)
    # Best-fit decreasing needs at most 11/9 of the fewest rows, which is at least the total over the budget, and
    # never leaves two rows that would fit into one.
    if rows:
        loads = sorted(sum(sizes[position] for position in row) for row in rows)
        assert len(rows) == 1 or loads[0] + loads[1] > budget


def fewest_rows(sizes, budget):
    """By trying everything."""
    best = len(sizes)

    def place(at, loads):
        nonlocal best
        if len(loads) >= best:
            return
        if at == len(sizes):
            best = len(loads)
            return
        for row in range(len(loads)):
            if loads[row] + sizes[at] <= budget:
                place(at + 1, [*loads[:row], loads[row] + sizes[at], *loads[row + 1 :]])
        place(at + 1, [*loads, sizes[at]])

    place(0, [])
    return best


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(30, 60))
@example([24, 24, 24, 25, 25, 25], 49)  # smallest first would need half as many rows again
def test_the_number_of_rows_is_near_the_fewest(sizes, budget):
    assert len(pack_rows(sizes, budget)) <= math.floor(11 / 9 * fewest_rows(sizes, budget) + 6 / 9)


def test_large_samples_are_placed_first():
    # Placed as they come, the first twelve would fill rows in pairs and leave no room for the others: 12 rows of 9.
    assert len(pack_rows([49] * 6 + [51] * 6, 100)) == 6
    assert len(pack_rows([34] * 6 + [66] * 6, 100)) == 6


def test_rows_without_a_limit_hold_everything():
    assert pack_rows([3.0, 1.0, 2.0], math.inf) == ((0, 1, 2),)
    assert pack_rows([], 10) == ()
