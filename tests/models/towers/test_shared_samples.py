"""Ranks share images of unlike sizes by samples, told from sizes alone."""

from __future__ import annotations

import numpy as np
import pytest

from dilatant.models.parallel.shared_samples import share_by_size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_sample_has_one_rank_and_ranks_are_balanced(size: int) -> None:
    tokens = [*np.random.default_rng(size).integers(0, 60, 40).tolist(), 0, 0]
    owners = share_by_size(tokens, size)
    assert [len(each) for each in owners] == [int(count > 0) for count in tokens]
    loads = np.zeros(size, int)
    for each, count in zip(owners, tokens, strict=True):
        loads[each] += count
    assert loads.sum() == sum(tokens)
    # Graham's bound: the fullest has no more than the mean and one sample.
    assert loads.max() <= sum(tokens) / size + max(tokens)
