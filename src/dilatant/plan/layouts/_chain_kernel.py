"""Compiled loops over the device groups of one chain."""

import math

import numpy as np
from numba import njit


@njit(cache=True, error_model="numpy")
def chain_times(
    work,
    least_work,
    forward,
    lightest,
    lightest_split,
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
    shared,
):
    """Return seconds: (longest work, longest work with gradient sync, least sync of a last bucket, most exposed sync).
    Arrays are [groups of devices]. least_work: of any microbatch. waits: each stage waits for the lightest sample to
    pass the stages before it; its gradient sync does not wait for their backwards. sync_at_end: a stage syncs all
    gradients after its backwards, without overlap. The first `shared` groups run several stages, whose sync may be over
    before the last backward."""
    busiest, longest, least, exposed = -np.inf, -np.inf, np.inf, -np.inf
    ahead = first = 0.0
    for group in range(work.size):
        busy = microbatches * max(work[group], least_work[group])
        busiest = max(busiest, busy + ahead)
        last = 1.0 if sync_at_end else 1.0 / max(1.0, math.ceil(held[group] / bucket))
        sums = ring * held[group] / ring_bandwidth
        exposed = max(exposed, sums - backward[group], sums * last)
        sums = sync * held[group] / bandwidth
        final = sums * last if group >= shared else 0.0
        longest = max(longest, first + busy + final, first + microbatches * forward[group] + sums)
        least = min(least, final)
        if waits:
            ahead += lightest[group]
            first += lightest_split[group]
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


@njit(cache=True)
def undominated(worth):
    """Return a mask of the rows that no earlier row of the mask equals or beats in every column; `worth` is [rows,
    columns], less is better."""
    rows, columns = worth.shape
    mask, kept, count = np.zeros(rows, np.bool_), np.empty(rows, np.int64), 0
    for row in range(rows):
        for at in range(count):
            column = 0
            while column < columns and worth[kept[at], column] <= worth[row, column]:
                column += 1
            if column == columns:
                break
        else:
            mask[row] = True
            kept[count] = row
            count += 1
    return mask


@njit(cache=True)
def shorter_fills(devices, fill, budget):
    """Return a mask of the rows whose fill is shorter than that of all earlier rows on as many devices."""
    least, mask = np.full(budget + 1, np.inf), np.zeros(devices.size, np.bool_)
    for row in range(devices.size):
        if fill[row] < least[devices[row]]:
            least[devices[row]] = fill[row]
            mask[row] = True
    return mask
