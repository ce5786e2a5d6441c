"""Compiled loops over the device groups of one chain."""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(cache=True, error_model="numpy")
def chain_times(
    work,
    forward,
    lightest,
    held,
    backward,
    microbatches,
    waits,
    ring,
    ring_bandwidth,
    sync,
    bandwidth,
    bucket,
    sync_at_end,
):
    """Return seconds: (longest work, longest work with gradient sync, least sync of a last bucket, most exposed sync).
    Arrays are [groups of devices]. waits: each stage waits for the lightest sample to pass the stages before it.
    sync_at_end: a stage syncs all gradients after its backwards, without overlap."""
    busiest, longest, least, exposed = -np.inf, -np.inf, np.inf, -np.inf
    ahead = 0.0
    for group in range(work.size):
        busy = microbatches * work[group]
        if waits:
            ahead += lightest[group]
            busy = busy + ahead - lightest[group]
        last = 1.0 if sync_at_end else 1.0 / max(1.0, math.ceil(held[group] / bucket))
        sums = ring * held[group] / ring_bandwidth
        exposed = max(exposed, sums - backward[group], sums * last)
        sums = sync * held[group] / bandwidth
        busiest = max(busiest, busy)
        longest = max(longest, busy + sums * last, microbatches * forward[group] + sums)
        least = min(least, sums * last)
    return busiest, longest, least, exposed


@njit(cache=True, error_model="numpy")
def max_following_stages(capacity, static, transient, kept, microbatches, chunks, unlimited):
    """Return how many stages may follow the chain before its microbatches in flight overflow memory; bytes [groups]."""
    groups = kept.size
    headroom = float(unlimited)
    for group in range(groups):
        free = capacity - static[group] - transient[group]
        if free < 0.0:
            return -1 - groups * chunks
        if kept[group] * microbatches > free:
            in_flight = free // (kept[group] / chunks)
            if chunks > 1:
                # Forwards of chunks before the first backward, see `schedule.families.families.interleaved`.
                in_flight = (in_flight - (chunks - 1) * groups - 1) // 2 + 1
            headroom = min(headroom, in_flight - 1 - (groups - 1 - group))
    return int(headroom)
