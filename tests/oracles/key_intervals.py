"""Masks as two libraries write them, read pair by pair as their pages define them. Shares no code with the package.

MagiAttention: the page of `flex_flash_attn_func` (a list of ranges of queries and of keys, with a type each). cuDNN's
Flex: the page of `create_mask_plan` (`[0, F0) U [F1, F2) U ...`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slice_pairs(queries: int, keys: int, kind: int) -> np.ndarray:
    """Return which keys the queries of one slice see, bool `[queries, keys]`: 0 is full; 1 is causal, aligned at the
    bottom right; 2 is inverse causal, aligned at the top left; 3 is where both hold."""
    seen = np.zeros((queries, keys), bool)
    for query in range(queries):
        for key in range(keys):
            from_last_query, from_last_key = queries - 1 - query, keys - 1 - key
            below, above = from_last_key >= from_last_query, key >= query
            seen[query, key] = {0: True, 1: below, 2: above, 3: below and above}[kind]
    return seen


def slice_matrix(query_ranges: Sequence, key_ranges: Sequence, kinds: Sequence, shape: tuple[int, int]) -> np.ndarray:
    """Return how many slices let each query see each key: int `[queries, keys]`. The kernel adds up slices, so that a
    pair in two of them counts twice."""
    times = np.zeros(shape, int)
    for (first, end), (low, high), kind in zip(query_ranges, key_ranges, kinds, strict=True):
        assert 0 <= first < end <= shape[0], (first, end)
        assert 0 <= low < high <= shape[1], (low, high)
        times[first:end, low:high] += slice_pairs(end - first, high - low, int(kind))
    return times


def end_matrix(ends: Sequence[Sequence[int]], keys: int) -> np.ndarray:
    """Return which keys each query sees, bool `[queries, keys]`, from `ends[f][query]`."""
    queries = len(ends[0])
    assert len(ends) % 2 == 1
    seen = np.zeros((queries, keys), bool)
    for query in range(queries):
        of_query = [int(row[query]) for row in ends]
        before = 0
        for end in of_query:
            assert before <= end <= keys, of_query
            before = end
        for low, high in zip([0, *of_query[1::2]], of_query[::2], strict=True):
            seen[query, low:high] = True
    return seen
