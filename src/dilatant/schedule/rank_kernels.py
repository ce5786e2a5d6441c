"""Compiled loops over each rank's events in time order, cached on disk by numba.

Importing this module imports numba.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def order_within(offsets, key):
    """Return the indices that stably sort each segment of `key` [offsets[-1]] ascending; `offsets` bounds the segments.
    Natural merge sort: neighbouring ascending runs are merged until one is left."""
    size = offsets[-1]
    order, other = np.arange(size), np.empty(size, dtype=np.int64)
    bounds = np.empty(size + 2, dtype=np.int64)
    for segment in range(len(offsets) - 1):
        first, end = offsets[segment], offsets[segment + 1]
        runs = 0
        for at in range(first, end):
            if at == first or key[at] < key[at - 1]:
                bounds[runs] = at
                runs += 1
        while runs > 1:
            bounds[runs], bounds[runs + 1] = end, end
            merged = 0
            for run in range(0, runs, 2):
                low, middle, high = bounds[run], bounds[run + 1], bounds[run + 2]
                left, right = low, middle
                for at in range(low, high):
                    if right == high or (left < middle and key[order[left]] <= key[order[right]]):
                        other[at] = order[left]
                        left += 1
                    else:
                        other[at] = order[right]
                        right += 1
                bounds[merged] = low
                merged += 1
            order[first:end] = other[first:end]
            runs = merged
    return order


@njit(cache=True, nogil=True)
def peak_by_rank(rank, when, taken, num_ranks):
    """Return each rank's peak of the running sum of `taken` (negative: released), by `when`; at equal times only the
    sum after all events is used."""
    offsets = np.zeros(num_ranks + 1, dtype=np.int64)
    for event in range(len(rank)):
        offsets[rank[event] + 1] += 1
    for index in range(num_ranks):
        offsets[index + 1] += offsets[index]
    fill = offsets[:-1].copy()
    time, delta = np.empty(len(rank)), np.empty(len(rank))
    for event in range(len(rank)):
        at = fill[rank[event]]
        time[at], delta[at] = when[event], taken[event]
        fill[rank[event]] = at + 1
    order = order_within(
        offsets, time
    )  # mostly sorted already: actions and messages of a rank come in its run order
    peak = np.zeros(num_ranks)
    for index in range(num_ranks):
        held = 0.0
        for at in range(offsets[index], offsets[index + 1]):
            held += delta[order[at]]
            if at + 1 == offsets[index + 1] or time[order[at + 1]] > time[order[at]]:
                peak[index] = max(peak[index], held)
    return peak
