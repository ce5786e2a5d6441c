"""Compiled loops of placement: sorting, the heap, and swaps.

Workloads are non-negative int64. Everything here is deterministic, ties included, so that all ranks derive the same
placement independently.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_DIGIT = 11
_BUCKETS = 1 << _DIGIT


@njit(cache=True, error_model="numpy")
def descending(keys):
    """Return indices of non-negative int64 keys, largest first, equal keys in order (radix sort to the highest
    digit)."""
    size = keys.shape[0]
    order = np.arange(size)
    other = np.empty(size, np.int64)
    largest = 0
    for key in keys:
        largest = max(largest, key)
    count = np.empty(_BUCKETS + 1, np.int64)
    shift = 0
    while shift < 63 and largest >> shift:
        count[:] = 0
        for index in range(size):
            count[_BUCKETS - 1 - ((keys[index] >> shift) & (_BUCKETS - 1)) + 1] += 1
        for bucket in range(_BUCKETS):
            count[bucket + 1] += count[bucket]
        for place in range(size):
            index = order[place]
            bucket = _BUCKETS - 1 - ((keys[index] >> shift) & (_BUCKETS - 1))
            other[count[bucket]] = index
            count[bucket] += 1
        order, other = other, order
        shift += _DIGIT
    return order


@njit(cache=True, error_model="numpy")
def _replace_top(heap, size, key):
    """Replace the least key by `key` and restore the heap. The hole first moves down to a leaf, since a rank that has
    just received an item seldom stays near the top, and choosing the lesser child needs no branch."""
    hole, child = 0, 1
    while child + 1 < size:
        child += 1 if heap[child + 1] < heap[child] else 0
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    if child < size:
        heap[hole] = heap[child]
        hole = child
    while hole > 0 and heap[(hole - 1) >> 1] > key:
        heap[hole] = heap[(hole - 1) >> 1]
        hole = (hole - 1) >> 1
    heap[hole] = key


@njit(cache=True, error_model="numpy")
def assign_longest_first(work, order, num_ranks, rank_bits):
    """Assign each item of `order` to the least loaded rank; item counts differ by one at most.

    A heap key is load << rank_bits | rank; with rank_bits for the rank, the total of `work` must fit in 63 bits.
    Returns the rank of every item.
    """
    size = work.shape[0]
    rank_of = np.empty(size, np.int32)
    counts = np.zeros(num_ranks, np.int64)
    base = size // num_ranks
    extra = size % num_ranks  # ranks that may hold one item more than `base`
    heap = np.arange(num_ranks)
    ranks_left = num_ranks
    for item in order:
        rank = heap[0] & ((1 << rank_bits) - 1)
        while counts[rank] > base or (counts[rank] == base and extra == 0):
            ranks_left -= 1
            _replace_top(heap, ranks_left, heap[ranks_left])
            rank = heap[0] & ((1 << rank_bits) - 1)
        if counts[rank] == base:
            extra -= 1
        rank_of[item] = rank
        counts[rank] += 1
        _replace_top(heap, ranks_left, heap[0] + (work[item] << rank_bits))
    return rank_of


@njit(cache=True, error_model="numpy")
def _best_swap(work, items, first, loads, high, low):
    """Find the swap between two ranks that equalises their loads most; return the greater load after it, and the
    positions of the two items. Both ranks' items are sorted by descending work."""
    gap = loads[high] - loads[low]
    best, best_i, best_j = loads[high], -1, -1
    j = first[low]
    for i in range(first[high], first[high + 1]):
        heavy = work[items[i]]
        while j < first[low + 1] and heavy - work[items[j]] <= gap // 2:
            j += 1
        # Item j - 1 is the lightest whose difference is at most half the gap, item j the next lighter one.
        for k in (j - 1, j):
            if first[low] <= k < first[low + 1]:
                difference = heavy - work[items[k]]
                top = max(loads[high] - difference, loads[low] + difference)
                if top < best:
                    best, best_i, best_j = top, i, k
    return best, best_i, best_j


@njit(cache=True, error_model="numpy")
def swap_to_even(work, order, rank_of, num_ranks, enough, budget):
    """Swap items between the most loaded rank and others while its load falls, until the load is at most `enough`.

    Counts stay unchanged: this recovers the balance that equal counts cost. `order` lists the items by descending work.
    Changes `rank_of` in place; stops after `budget` comparisons.
    """
    size = work.shape[0]
    first = np.zeros(num_ranks + 1, np.int64)
    for item in range(size):
        first[rank_of[item] + 1] += 1
    for rank in range(num_ranks):
        first[rank + 1] += first[rank]
    free = first.copy()
    items = np.empty(size, np.int64)  # per rank, by descending work
    loads = np.zeros(num_ranks, np.int64)
    for item in order:
        rank = rank_of[item]
        items[free[rank]] = item
        free[rank] += 1
        loads[rank] += work[item]
    while budget > 0:
        high = int(np.argmax(loads))
        if loads[high] <= enough:
            break
        budget -= num_ranks + 2 * size // num_ranks
        # Swap with the least loaded rank if that helps at all, else with the rank that helps most.
        best_rank = int(np.argmin(loads))
        top, best_i, best_j = _best_swap(work, items, first, loads, high, best_rank)
        if top >= loads[high]:
            budget -= num_ranks + 2 * size
            best_top = loads[high]
            for rank in range(num_ranks):
                if loads[rank] + 1 < loads[high]:
                    top, i, j = _best_swap(work, items, first, loads, high, rank)
                    if top < best_top:
                        best_rank, best_top, best_i, best_j = rank, top, i, j
            if best_top == loads[high]:
                break
        heavy, light = items[best_i], items[best_j]
        difference = work[heavy] - work[light]
        loads[high] -= difference
        loads[best_rank] += difference
        rank_of[heavy], rank_of[light] = best_rank, high
        items[best_i], items[best_j] = light, heavy
        while best_i + 1 < first[high + 1] and work[items[best_i]] < work[items[best_i + 1]]:
            items[best_i], items[best_i + 1] = items[best_i + 1], items[best_i]
            best_i += 1
        while best_j > first[best_rank] and work[items[best_j]] > work[items[best_j - 1]]:
            items[best_j], items[best_j - 1] = items[best_j - 1], items[best_j]
            best_j -= 1
