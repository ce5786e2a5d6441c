"""Compiled knapsack loops of pipeline composition."""

import numpy as np
from numba import njit


@njit(cache=True)
def microbatches_within(limit, seconds, bottleneck, planned, most):
    """Return how many microbatches (at most `most`) each template finishes within `limit` seconds; 0 if none."""
    counts = np.zeros(seconds.size, np.int64)
    for i in range(seconds.size):
        count = most
        if bottleneck[i] > 0.0:
            ratio = (limit - seconds[i]) / bottleneck[i]
            count = max(0, min(most, planned[i] + np.int64(min(max(ratio, -1e15), 1e15))))
        while count < most and seconds[i] + (count + 1 - planned[i]) * bottleneck[i] <= limit:
            count += 1
        while count > 0 and seconds[i] + (count - planned[i]) * bottleneck[i] > limit:
            count -= 1
        counts[i] = count
    return counts


@njit(cache=True)
def _fill(nodes, values, num_nodes, levels, saturate, best, choice):
    """Fill best[c, n]: the largest sum of values over c pipelines that use exactly n nodes; -1 if there are none.

    With `saturate` the last level means that many pipelines or more. Templates of value 0 are omitted. choice[c, n] = 2
    * template, plus 1 if the remaining pipelines are on the same level.
    """
    for c in range(levels):
        best[c, 0] = -1
    best[0, 0] = 0
    for n in range(1, num_nodes + 1):
        for c in range(levels):
            largest = -1
            chosen = 0
            if saturate and c == levels - 1:
                for i in range(nodes.size):
                    if nodes[i] <= n and values[i] > 0 and best[c, n - nodes[i]] >= 0:
                        value = best[c, n - nodes[i]] + values[i]
                        if value > largest:
                            largest = value
                            chosen = 2 * i + 1
            if c > 0:
                for i in range(nodes.size):
                    if nodes[i] <= n and values[i] > 0 and best[c - 1, n - nodes[i]] >= 0:
                        value = best[c - 1, n - nodes[i]] + values[i]
                        if value > largest:
                            largest = value
                            chosen = 2 * i
            best[c, n] = largest
            choice[c, n] = chosen


@njit(cache=True)
def _most(best, least, num_nodes):
    """Return the largest sum that uses all nodes, over the levels from `least` on."""
    most = best[least, num_nodes]
    for level in range(least + 1, best.shape[0]):
        most = max(most, best[level, num_nodes])
    return most


@njit(cache=True)
def _bisect(nodes, seconds, bottleneck, planned, num_nodes, total, low, high, least, levels, saturate):
    """Return the least time limit within which some composition runs `total` microbatches, and its tables.

    `low` is a lower bound that is tried first, `high` a limit known to suffice. Both ends always move onto times at
    which some template can finish, so they meet on the optimum.
    """
    best = np.empty((levels, num_nodes + 1), np.int64)
    choice = np.zeros((levels, num_nodes + 1), np.int64)
    limit = low
    while low < high:
        counts = microbatches_within(limit, seconds, bottleneck, planned, total)
        _fill(nodes, counts, num_nodes, levels, saturate, best, choice)
        reached = -np.inf
        following = np.inf
        for i in range(nodes.size):
            if counts[i] > 0:
                reached = max(reached, seconds[i] + (counts[i] - planned[i]) * bottleneck[i])
            if counts[i] < total:
                following = min(following, seconds[i] + (counts[i] + 1 - planned[i]) * bottleneck[i])
        if _most(best, least, num_nodes) >= total:
            high = reached
        else:
            low = min(following, high)
        limit = low + (high - low) / 2
        if limit >= high:
            limit = low
    counts = microbatches_within(high, seconds, bottleneck, planned, total)
    _fill(nodes, counts, num_nodes, levels, saturate, best, choice)
    return high, best, choice


@njit(cache=True)
def share(seconds, bottleneck, planned, total):
    """Divide `total` microbatches among pipelines, at least one each, so that the slowest finishes earliest.

    The limit is the least one at which max(1, microbatches that fit) adds up to `total`; the pipelines that end exactly
    on it then give back the surplus (which is smaller than their number, or the limit would be lower).
    """
    low = np.inf
    high = -np.inf
    for i in range(seconds.size):
        low = min(low, seconds[i] + (1 - planned[i]) * bottleneck[i])
        high = max(high, seconds[i] + (total - planned[i]) * bottleneck[i])
    limit = low
    while low < high:
        counts = np.maximum(1, microbatches_within(limit, seconds, bottleneck, planned, total))
        finish = seconds + (counts - planned) * bottleneck
        if counts.sum() >= total:
            high = low
            for i in range(seconds.size):
                if finish[i] <= limit:
                    high = max(high, finish[i])
        else:
            following = high
            for i in range(seconds.size):
                if counts[i] < total:
                    following = min(following, seconds[i] + (counts[i] + 1 - planned[i]) * bottleneck[i])
            low = following
        limit = low + (high - low) / 2
        if limit >= high:
            limit = low
    counts = np.maximum(1, microbatches_within(high, seconds, bottleneck, planned, total))
    surplus = counts.sum() - total
    for i in range(seconds.size):
        if surplus > 0 and counts[i] > 1 and seconds[i] + (counts[i] - planned[i]) * bottleneck[i] == high:
            counts[i] -= 1
            surplus -= 1
    return counts


@njit(cache=True)
def compose(nodes, seconds, bottleneck, planned, num_nodes, fewest, total):
    """Return (template of each pipeline, number of pipelines) of the composition whose slowest pipeline is fastest.

    The composition has at least `fewest` and at most `total` pipelines (each runs a microbatch) on exactly `num_nodes`
    nodes. Such a composition must exist.
    """
    low = np.inf
    high = -np.inf
    for i in range(nodes.size):
        low = min(low, seconds[i] + (1 - planned[i]) * bottleneck[i])
        high = max(high, seconds[i] + (total - planned[i]) * bottleneck[i])
    smallest = num_nodes
    for size in nodes:
        smallest = min(smallest, size)
    levels = np.int64(1)
    saturate = fewest >= 0  # always true; gives numba the type used below
    least = np.int64(0)
    while True:
        limit, best, choice = _bisect(
            nodes, seconds, bottleneck, planned, num_nodes, total, low, high, least, levels, saturate
        )
        level = least
        while best[level, num_nodes] < _most(best, least, num_nodes):
            level += 1
        pipelines = np.empty(num_nodes, np.int64)
        number = 0
        n = num_nodes
        while n > 0:
            template = choice[level, n] // 2
            level -= 1 - choice[level, n] % 2
            pipelines[number] = template
            number += 1
            n -= nodes[template]
        if fewest <= number <= total:
            return pipelines, number
        # Each counted pipeline costs a level, so pipelines are counted only if the unconstrained optimum has too few
        # or too many; its time stays a lower bound.
        low = limit
        least = fewest
        saturate = num_nodes // smallest <= total
        levels = (fewest if saturate else total) + 1
