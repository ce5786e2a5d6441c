"""Compiled loops of the layer partitioner, and of its cuts within memory."""

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
def min_max_sums(costs, others, most):
    """Return the largest stage sums of `costs` under `min_max_cuts` into 1 to `most` stages, and those of `others` in
    these cuts: [2, most]; infinite when a cost is negative or not finite."""
    found = np.zeros((2, most))
    for stages in range(1, most + 1):
        cuts, end = min_max_cuts(costs, stages), costs.size
        if cuts.size == 0:
            return np.full((2, most), np.inf)
        for stage in range(stages - 1, -1, -1):
            found[0, stages - 1] = max(found[0, stages - 1], costs[cuts[stage] : end].sum())
            found[1, stages - 1] = max(found[1, stages - 1], others[cuts[stage] : end].sum())
            end = cuts[stage]
    return found


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


@njit(cache=True)
def relaxed(cuts, static, transient, recomputed, free, capacity, behind, microbatches, guests):
    """Recompute fewer layers: in each stage, as many layers from the end as memory allows keep their activations.
    cuts: first layers of stages, and the number of layers. `recomputed` and `free` are [kept bytes, seconds, backward
    seconds; layers] with and without recomputation. guests: the first layer includes other units, which recompute.
    Return the mask of layers that recompute, and [static, transient, kept, seconds, backward; stages]."""
    stages = cuts.size - 1
    again, found = np.ones(static.size, np.bool_), np.zeros((5, stages))
    for stage in range(stages):
        first, end = cuts[stage], cuts[stage + 1]
        peak, after, kept = -np.inf, 0.0, 0.0
        for layer in range(end - 1, first - 1, -1):
            peak = max(peak, transient[layer] - after)
            after += recomputed[0, layer]
            found[0, stage] += static[layer]
        for layer in range(first, end):
            kept += recomputed[0, layer]
        in_flight = min(stages - stage + behind, microbatches)
        left, gain = capacity - found[0, stage] - peak - in_flight * kept, 0.0
        for layer in range(end - 1, first - 1, -1):
            gain += free[0, layer] - recomputed[0, layer]
            again[layer] = in_flight * gain > left
        again[0] |= guests
        peak, after = -np.inf, 0.0
        for layer in range(end - 1, first - 1, -1):
            costs = recomputed if again[layer] else free
            peak = max(peak, transient[layer] - after)
            after += costs[0, layer]
            for row in range(3):
                found[2 + row, stage] += costs[row, layer]
        found[1, stage] = peak
    return again, found


@njit(cache=True)
def _fits(cuts, static, transient, kept, capacity, behind, microbatches):
    """Return True if each stage holds its layers with all microbatches in flight."""
    stages, end = cuts.size, static.size
    for stage in range(stages - 1, -1, -1):
        held, peak, after = 0.0, -np.inf, 0.0
        for layer in range(end - 1, cuts[stage] - 1, -1):
            peak = max(peak, transient[layer] - after)
            after += kept[layer]
            held += static[layer]
        end = cuts[stage]
        if held + peak + min(stages - stage + behind, microbatches) * after > capacity:
            return False
    return True


@njit(cache=True)
def fastest_in_memory(stages, static, twice, transient, times, capacity, behind, microbatches, guests):
    """Return chains within memory at their best level of recomputation: [4, chains] of the seconds of the slowest stage
    and of all, infinite where no level fits; the level; and 1 where the fastest cut fits without recomputation, else 0.
    stages: of each chain. static, twice, transient: bytes [levels, layers], of which a single stage does not hold
    `twice`; times: [levels, 3, layers], as for `relaxed`. The first level recomputes nothing. Other arguments as for
    `relaxed`."""
    levels, layers = static.shape
    found = np.full((4, stages.size), np.inf)
    found[3] = 0.0
    cuts_and_end = np.empty(layers + 1, np.int64)
    for chain in range(stages.size):
        number, best = stages[chain], np.inf
        flying = np.empty(number)
        for stage in range(number):
            flying[stage] = min(number - stage + behind, microbatches)
        for level in range(levels):
            held = static[level] - twice[level] if number == 1 else static[level]
            kept, seconds = times[level, 0], times[level, 1]
            together = held.sum() + flying[number - 1] * kept.sum()
            alone = held[0] + transient[level, 0] + flying[0] * kept[0]
            if max(alone, together / number) > capacity:
                continue
            cuts = min_max_cuts(seconds, number)
            is_free = _fits(cuts, held, transient[level], kept, capacity, behind, microbatches)
            if not is_free:
                room = np.full(number, capacity - transient[level].max())
                cuts = min_max_cuts_in_memory(seconds, held, kept, flying, room)
                if cuts.size == 0:
                    continue
            cuts_and_end[:number] = cuts
            cuts_and_end[number] = layers
            if level == 0:
                slowest, total = 0.0, 0.0
                for stage in range(number):
                    own = seconds[cuts[stage] : cuts_and_end[stage + 1]].sum()
                    slowest, total = max(slowest, own), total + own
            else:
                ends = cuts_and_end[: number + 1]
                held_by = held, transient[level], times[level], times[0]
                _, sums = relaxed(ends, *held_by, capacity, behind, microbatches, guests)
                slowest, total = sums[3].max(), sums[3].sum()
            if total + (microbatches - 1) * slowest < best:
                best = total + (microbatches - 1) * slowest
                found[0, chain], found[1, chain], found[2, chain] = slowest, total, level
            if is_free and level == 0:
                found[3, chain] = 1.0
                break
    return found
