"""Compiled loops over the rows of ranks, cached on disk by numba: events in time order, split backwards, and longest
paths along messages. Importing this module imports numba.
"""

import numpy as np
from numba import njit

_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = range(4)


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
    order = order_within(offsets, time)  # mostly sorted already: actions and messages of a rank come in its run order
    peak = np.zeros(num_ranks)
    for index in range(num_ranks):
        held = 0.0
        for at in range(offsets[index], offsets[index + 1]):
            held += delta[order[at]]
            if at + 1 == offsets[index + 1] or time[order[at + 1]] > time[order[at]]:
                peak[index] = max(peak[index], held)
    return peak


@njit(cache=True, nogil=True)
def _weight_gradient(row, at, stage, piece, held, owed, new_kind, new_stage, new_piece):
    """Write the weight half of the backward `row` at `at`; return the position after it."""
    held[stage[row]] -= 1
    owed[stage[row]] -= 1
    new_kind[at], new_stage[at], new_piece[at] = _WEIGHT_GRADIENT, stage[row], piece[row]
    return at + 1


@njit(cache=True, nogil=True)
def split_rows(offsets, kind, stage, piece, splits, limits):
    """Return the packed rows of `split_backward`: offsets [ranks + 1], kind, stage, piece [rows]. `splits` and `limits`
    are by stage: whether its backwards are split, and how many pieces it may hold."""
    count = len(kind)
    for row in range(len(kind)):
        count += kind[row] == _BACKWARD and splits[stage[row]]
    new_offsets = np.zeros(len(offsets), dtype=np.int64)
    new_kind = np.empty(count, dtype=np.int8)
    new_stage, new_piece = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    new = new_kind, new_stage, new_piece
    waiting = np.empty(len(kind), dtype=np.int64)  # rows of backwards with pending weight gradients
    held = np.zeros(len(splits), dtype=np.int64)
    owed = np.zeros(len(splits), dtype=np.int64)
    at = 0
    for rank in range(len(offsets) - 1):
        oldest = newest = forwards = 0
        for row in range(offsets[rank], offsets[rank + 1]):
            forwards += kind[row] == _FORWARD
            held[stage[row]] = owed[stage[row]] = 0
        for row in range(offsets[rank], offsets[rank + 1]):
            own = stage[row]
            forward = kind[row] == _FORWARD
            split = kind[row] == _BACKWARD and splits[own]
            if forward:
                forwards -= 1
                while held[own] >= limits[own] and owed[own] > 0:
                    at = _weight_gradient(waiting[oldest], at, stage, piece, held, owed, *new)
                    oldest += 1
                held[own] += splits[own]
            new_kind[at], new_stage[at], new_piece[at] = kind[row], own, piece[row]
            if split:
                new_kind[at] = _INPUT_GRADIENT
                waiting[newest] = row
                newest += 1
                owed[own] += 1
            at += 1
            if split and forwards == 0:
                at = _weight_gradient(waiting[oldest], at, stage, piece, held, owed, *new)
                oldest += 1
        for index in range(oldest, newest):
            at = _weight_gradient(waiting[index], at, stage, piece, held, owed, *new)
        new_offsets[rank + 1] = at
    return new_offsets, new_kind, new_stage, new_piece


@njit(cache=True, nogil=True)
def seconds_before(order, offsets, source, edge, num_messages, seconds):
    """Return the longest path of messages to each op, excluding the op: [ops]. Arguments are a `ScheduleGraph`'s: edges
    are by position in `order`, and edge numbers below `num_messages` are messages."""
    before = np.zeros(len(order))
    for position in range(len(order)):
        op = order[position]
        for at in range(offsets[position], offsets[position + 1]):
            if edge[at] < num_messages:
                earlier = order[source[at]]
                before[op] = max(before[op], before[earlier] + seconds[earlier])
    return before


@njit(cache=True, nogil=True)
def seconds_after(order, offsets, source, edge, num_messages, seconds):
    """Return the longest path of messages from each op, excluding the op: [ops]."""
    after = np.zeros(len(order))
    for position in range(len(order) - 1, -1, -1):
        op = order[position]
        for at in range(offsets[position], offsets[position + 1]):
            if edge[at] < num_messages:
                earlier = order[source[at]]
                after[earlier] = max(after[earlier], after[op] + seconds[op])
    return after
