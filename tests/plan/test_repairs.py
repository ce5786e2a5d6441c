"""What recomputes in plans that overflow in simulation: as few layers as will do, and fewer where memory is left."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dilatant.plan.search.repairs import cheapest


@pytest.mark.parametrize("seed", range(60))
def test_levels_are_nearly_the_cheapest_that_save_enough(seed: int) -> None:
    """Against all combinations of levels; alike layers, as those of a model are."""
    draw = np.random.default_rng(seed)
    kinds, levels = draw.integers(1, 3), draw.integers(2, 4)
    number = np.sort(draw.integers(0, kinds, draw.integers(1, 7)))
    saved = np.cumsum(draw.uniform(0.5, 2.0, (levels, kinds)), axis=0)[:, number]
    kept, seconds = saved.max() - saved, np.cumsum(draw.uniform(0.5, 2.0, (levels, kinds)), axis=0)[:, number]
    at, now = np.arange(len(number)), np.zeros(len(number), dtype=np.int64)
    needed = float(draw.uniform(0.0, 1.2) * (kept[0] - kept[-1]).sum())
    found = cheapest(kept, seconds, now, needed)
    ways = [np.array(way) for way in itertools.product(range(levels), repeat=len(number))]
    enough = [float(seconds[way, at].sum()) for way in ways if (kept[now, at] - kept[way, at]).sum() >= needed]
    assert (found is None) == (not enough)
    if found is not None:
        assert (kept[now, at] - kept[found, at]).sum() >= needed
        # One layer may be raised further than it must be.
        most = float((seconds[-1] - seconds[0]).max())
        assert float(seconds[found, at].sum()) < min(enough) + most
