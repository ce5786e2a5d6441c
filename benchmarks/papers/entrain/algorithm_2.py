"""Entrain's Algorithm 2 (the thesis, 4.4.2) as printed: double the batch until all trials ask for the same devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Allocation = tuple[int, ...]


def trial_batch(
    work: ArrayLike,
    allocations: Sequence[Allocation],
    confidence: float = 0.95,
    error: float = 0.05,
    largest: int | None = None,
    seed: int = 0,
) -> tuple[int | None, Mapping[int, tuple[Allocation, ...]]]:
    """Return (batch at which all trials agree or None, allocations found by batch size).

    Draws a reference batch and ceil(ln(1 - confidence) / ln(1 - error)) more, and doubles their size from 1 until all
    prefer the allocation nearest to proportional. The result varies between seeds by a factor of 2 to 4, more near a
    breakpoint, where the printed loop does not end; here it ends at `largest`, by default the number of samples.
    """
    samples, table = np.asarray(work, dtype=np.float64), np.array(allocations, dtype=np.float64)
    trials = math.ceil(math.log(1.0 - confidence) / math.log(1.0 - error))
    draw, seen, n = np.random.default_rng(seed), dict[int, tuple[Allocation, ...]](), 1
    while n <= (largest or len(samples)):
        means = [samples[draw.integers(len(samples), size=n)].mean(axis=0) for _ in range(trials + 1)]
        picks = _nearest(np.stack(means), table)
        seen[n] = tuple(tuple(allocations[k]) for k in np.unique(picks))
        if len(seen[n]) == 1:
            return n, seen
        n *= 2
    return None, seen


def _nearest(means: NDArray[np.float64], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """The allocation nearest to proportional for each row of `means` [batches, units]; the first of equals."""
    shares = means / means.sum(axis=1, keepdims=True)
    distances = shares[:, None, :] - (table / table.sum(axis=1, keepdims=True))[None]
    return (distances**2).sum(axis=2).argmin(axis=1)
