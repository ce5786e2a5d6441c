"""Every composition of pipelines, with every way to share out the microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


def multisets(sizes: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """All non-increasing tuples of `sizes` that add up to `total`."""
    if total == 0:
        yield ()
        return
    for k, size in enumerate(sizes):
        if size <= total:
            for rest in multisets(sizes[k:], total - size):
                yield (size, *rest)


def slowest(pipelines: Sequence[int], microbatches: int, finish: Callable[[int, int], float]) -> float:
    """The least makespan of fixed pipelines: every split of the microbatches, one pipeline after another."""
    best = {0: float("-inf")}
    for k, size in enumerate(pipelines):
        left = len(pipelines) - 1 - k
        following: dict[int, float] = {}
        for used, time in best.items():
            for count in range(1, microbatches - used - left + 1):
                value = max(time, finish(size, count))
                if value < following.get(used + count, float("inf")):
                    following[used + count] = value
        best = following
    return best.get(microbatches, float("inf"))


def best_composition(
    sizes: Sequence[int], nodes: int, fewest: int, microbatches: int, finish: Callable[[int, int], float]
) -> float:
    """The least makespan over all compositions, infinite if there is none."""
    return min(
        (
            slowest(pipelines, microbatches, finish)
            for pipelines in multisets(sorted(sizes), nodes)
            if fewest <= len(pipelines) <= microbatches
        ),
        default=float("inf"),
    )
