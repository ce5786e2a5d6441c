"""Every placement of a few blocks on a few ranks, tried one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product


def least_maximum(workloads: Sequence[float], num_ranks: int, equal_counts: bool) -> float:
    """The smallest possible maximal load; with `equal_counts` no rank holds two blocks more than another."""
    best = float("inf")
    for ranks in product(range(num_ranks), repeat=len(workloads)):
        counts = [ranks.count(rank) for rank in range(num_ranks)]
        if equal_counts and max(counts) - min(counts) > 1:
            continue
        loads = [0.0] * num_ranks
        for work, rank in zip(workloads, ranks):
            loads[rank] += work
        best = min(best, max(loads))
    return best
