"""Sorting by merging runs is a stable sort of each segment."""

import itertools

import numpy as np
import pytest

from dilatant.schedule.rank_kernels import order_within


@pytest.mark.parametrize("seed", range(40))
def test_each_segment_is_sorted_and_equal_ones_stay_in_order(seed):
    draw = np.random.default_rng(seed)
    sizes = draw.integers(0, 30, draw.integers(1, 6))
    runs = [np.sort(draw.integers(0, 12, size).astype(float)) for size in draw.multinomial(sizes.sum(), [0.25] * 4)]
    key = np.concatenate(runs) if seed % 2 else draw.integers(0, 5, sizes.sum()).astype(float)
    offsets = np.cumsum(np.append(0, sizes))
    found = order_within(offsets, key)
    expected = [
        first + place
        for first, end in itertools.pairwise(offsets)
        for place in sorted(range(end - first), key=lambda place: key[first + place])
    ]
    assert found.tolist() == expected
