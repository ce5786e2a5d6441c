"""The best placement of a few blocks on a few ranks, by depth-first search over all placements."""

from __future__ import annotations

from collections.abc import Sequence


def least_maximum(workloads: Sequence[float], num_ranks: int, equal_counts: bool) -> float:
    """The smallest possible maximal load; with `equal_counts` no rank holds two blocks more than another."""
    items = sorted(workloads, reverse=True)
    best = float("inf")

    def search(item: int, held: list[tuple[float, int]]) -> None:
        nonlocal best
        if item == len(items):
            counts = [count for _, count in held]
            if not equal_counts or max(counts) - min(counts) <= 1:
                best = max(load for load, _ in held)
            return
        for load, count in set(held):  # ranks that hold as much are alike
            if load + items[item] < best:
                rank = held.index((load, count))
                search(item + 1, [*held[:rank], (load + items[item], count + 1), *held[rank + 1 :]])

    search(0, [(0.0, 0)] * num_ranks)
    return best
