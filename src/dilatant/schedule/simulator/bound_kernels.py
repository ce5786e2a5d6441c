"""Compiled longest paths along messages, ignoring the order on ranks, cached on disk; importing this imports numba.

Arguments are a `ScheduleGraph`'s; edges are by position in `order`, and edge numbers below `num_messages` are messages.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def seconds_before(order, offsets, source, edge, num_messages, seconds):
    """Return the longest path of messages to each op, excluding the op: [ops]."""
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
