"""Packing fills rows within the budget; a packed row is its samples one after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.data.packing import collate, pack_rows
from dilatant.data.sample import EncodedSample


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
def test_the_number_of_rows_is_near_the_fewest(sizes, budget):
    assert len(pack_rows(sizes, budget)) <= math.floor(11 / 9 * fewest_rows(sizes, budget) + 6 / 9)


def test_large_samples_are_placed_first():
    # Placed as they come, the first twelve would fill rows in pairs and leave no room for the others: 12 rows of 9.
    assert len(pack_rows([49] * 6 + [51] * 6, 100)) == 6
    assert len(pack_rows([34] * 6 + [66] * 6, 100)) == 6


def test_a_sample_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match=r"samples \[1\] have \[9\] tokens, but a row holds 8"):
        pack_rows([3, 9, 8], 8)


@st.composite
def encoded_samples(draw):
    samples = []
    for number in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 7))
        images = draw(st.integers(0, 2))
        ids = np.arange(length) + 100 * number
        labels = np.where(np.arange(length) % 2 == 1, ids, -100)
        media = {"vision": {"pixel_values": np.full((images, 1, 2, 2), number, np.float32)}} if images else {}
        samples.append(EncodedSample(str(number), ids, labels, media, {"language": length, "vision": images}))
    return samples


@settings(max_examples=100, deadline=None, print_blob=True)
@given(encoded_samples())
def test_a_row_is_its_samples_one_after_another(samples):
    row = collate(samples)
    assert row.sample_ids == tuple(sample.id for sample in samples)
    start = media = 0
    for sample, length in zip(samples, row.lengths):
        piece = slice(start, start + length)
        assert row.input_ids[piece].tolist() == sample.input_ids.tolist()
        assert row.labels[piece].tolist() == sample.labels.tolist()
        assert row.position_ids[piece].tolist() == list(range(length))
        for array in sample.media.get("vision", {}).values():
            assert (row.media["vision"]["pixel_values"][media : media + len(array)] == array).all()
            media += len(array)
        start += length
    assert start == len(row.input_ids) == row.sizes["language"]
    assert row.sizes["vision"] == media
    assert row.target_tokens == sum((sample.labels != -100).sum() for sample in samples)
    assert ("vision" in row.media) == (media > 0)


def test_a_row_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        collate([])
