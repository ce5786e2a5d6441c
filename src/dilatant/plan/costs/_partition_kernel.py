"""Compiled loops of the layer partitioner."""

import numpy as np
from numba import njit


@njit(cache=True)
def _reach(prefix, first, limit, guess):
    """Return the largest index `end` with prefix[end] - prefix[first] <= limit, searching outwards from `guess`."""
    last = prefix.size - 1
    end = min(max(guess, first), last)
    step = 1
    if prefix[end] - prefix[first] <= limit:
        low = end
        while low + step <= last and prefix[low + step] - prefix[first] <= limit:
            low += step
            step *= 2
        high = min(low + step, last + 1)
    else:
        high = end
        while prefix[max(high - step, first)] - prefix[first] > limit:
            high = max(high - step, first)
            step *= 2
        low = max(high - step, first)
    while high - low > 1:
        middle = (low + high) // 2
        if prefix[middle] - prefix[first] <= limit:
            low = middle
        else:
            high = middle
    return low


@njit(cache=True)
def min_max_cuts(costs, num_stages):
    """Return the first layer of every stage; empty when a cost is negative or not finite."""
    layers = costs.size
    prefix = np.empty(layers + 1)
    prefix[0] = 0.0
    largest = 0.0
    for k in range(layers):
        if not (costs[k] >= 0.0 and costs[k] < np.inf):
            return np.empty(0, np.int64)
        prefix[k + 1] = prefix[k] + costs[k]
        largest = max(largest, prefix[k + 1] - prefix[k])

    # The optimum lies in [low, high]. Both ends always move onto sums of consecutive layers, so they meet exactly
    # on the optimum after a finite number of steps. Filling stages up to the mean plus one layer always suffices. The
    # factors absorb the rounding of the division.
    low = max(largest, prefix[layers] / num_stages * (1.0 - 1e-15))
    high = min(prefix[layers], (low + largest) * (1.0 + 1e-14))
    while low < high:
        limit = low + (high - low) / 2
        if limit >= high:
            limit = low
        first = np.int64(0)  # a literal 0 would compile `_reach` once more
        length = layers // num_stages
        slowest = 0.0
        overflow = np.inf
        for stage in range(num_stages):
            most = layers - (num_stages - 1 - stage)
            end = _reach(prefix, first, limit, first + length)
            if end >= most:
                end = most
            else:
                overflow = min(overflow, prefix[end + 1] - prefix[first])
            slowest = max(slowest, prefix[end] - prefix[first])
            length = end - first
            first = end
        if first == layers:
            high = slowest
        else:
            low = overflow

    # First the earliest feasible cuts, from the right; then, from the left, each cut moves as near to the even split as
    # the bottleneck allows.
    earliest = np.empty(num_stages, np.int64)
    end = layers
    for stage in range(num_stages - 1, -1, -1):
        first = end - 1
        while first > stage and prefix[end] - prefix[first - 1] <= high:
            first -= 1
        earliest[stage] = first
        end = first
    cuts = np.empty(num_stages, np.int64)
    cuts[0] = 0
    for stage in range(1, num_stages):
        share = prefix[layers] * stage / num_stages
        cut = max(earliest[stage], cuts[stage - 1] + 1)
        most = layers - (num_stages - stage)
        while (
            cut < most
            and prefix[cut + 1] - prefix[cuts[stage - 1]] <= high
            and prefix[cut + 1] - share <= share - prefix[cut]
        ):
            cut += 1
        cuts[stage] = cut
    return cuts


@njit(cache=True)
def min_max_cuts_in_memory(costs, state_bytes, activation_bytes, in_flight, capacity):
    """Return the first layer of every stage, empty when nothing fits; recurrence: Cornstarch (the thesis), eq. 3.5.

    A stage may hold layers j..i only if their state and its own in-flight activations fit; a pointer that only moves
    right finds the largest such window.
    """
    layers = costs.size
    num_stages = in_flight.size
    time = np.zeros(layers + 1)
    state = np.zeros(layers + 1)
    activation = np.zeros(layers + 1)
    for k in range(layers):
        time[k + 1] = time[k] + costs[k]
        state[k + 1] = state[k] + state_bytes[k]
        activation[k + 1] = activation[k] + activation_bytes[k]
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    came_from = np.zeros((num_stages, layers + 1), np.int64)
    for stage in range(num_stages):
        following = np.full(layers + 1, np.inf)
        earliest = 0
        for end in range(stage + 1, layers - (num_stages - 1 - stage) + 1):
            while (
                earliest < end
                and state[end] - state[earliest] + in_flight[stage] * (activation[end] - activation[earliest])
                > capacity[stage]
            ):
                earliest += 1
            # Going left, the last stage grows: once it alone is slower than the best, no earlier start is better.
            for first in range(end - 1, max(earliest, stage) - 1, -1):
                own = time[end] - time[first]
                if own >= following[end]:
                    break
                slowest = max(best[first], own)
                if slowest < following[end]:
                    following[end] = slowest
                    came_from[stage, end] = first
        best = following
    if best[layers] == np.inf:
        return np.empty(0, np.int64)
    cuts = np.empty(num_stages, np.int64)
    end = layers
    for stage in range(num_stages - 1, -1, -1):
        cuts[stage] = came_from[stage, end]
        end = cuts[stage]
    return cuts
