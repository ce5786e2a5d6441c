"""Bin packing: pack samples of different lengths greedily into few rows with a token limit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_rows(sizes: Sequence[float], row_tokens: float) -> tuple[tuple[int, ...], ...]:
    """Return rows of indices into `sizes`, each row summing to at most `row_tokens`; every index occurs once.

    Best-fit decreasing needs at most 11/9 of the fewest rows, plus one (Johnson, 1974). Rows and the samples in them
    keep the order of `sizes`. Raises ValueError that names sizes which no row can hold.
    """
    too_long = [position for position, size in enumerate(sizes) if size > row_tokens]
    if too_long:
        raise ValueError(
            f"samples {too_long} have {[sizes[position] for position in too_long]} tokens, but a row holds {row_tokens}"
        )
    rows: list[list[int]] = []
    remaining: list[tuple[float, int]] = []  # (free tokens, row), sorted
    for position in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        best = bisect_left(remaining, (sizes[position], -1))
        if best == len(remaining):
            rows.append([position])
            insort(remaining, (row_tokens - sizes[position], len(rows) - 1))
        else:
            free, row = remaining.pop(best)
            rows[row].append(position)
            insort(remaining, (free - sizes[position], row))
    return tuple(sorted(tuple(sorted(row)) for row in rows))
