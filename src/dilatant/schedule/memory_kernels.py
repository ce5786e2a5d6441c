"""The memory sweep's inner loop, compiled by numba and cached on disk; importing this module imports numba."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def most_held(rank, when, taken, num_ranks):
    """The most that each rank holds, of what events take or, below 0, give back: in the order of time, at one moment
    what is given back first."""
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
    peak = np.zeros(num_ranks)
    held = 0.0
    for index in range(num_ranks):
        first, end = offsets[index], offsets[index + 1]
        order = np.argsort(time[first:end])
        moment, change = time[first:end][order], delta[first:end][order]
        before, at = held, 0
        while at < len(order):
            until = at + 1
            while until < len(order) and moment[until] == moment[at]:
                until += 1
            if until > at + 1:
                change[at:until] = np.sort(change[at:until])
            for event in range(at, until):
                held += change[event]
                peak[index] = max(peak[index], held - before)
            at = until
    return peak
