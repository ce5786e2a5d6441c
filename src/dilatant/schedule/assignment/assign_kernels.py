"""Inner loops of the microbatch policies, compiled by numba and cached on disk.

They use only additions, multiplications and comparisons of doubles, so that every machine derives the same result from
the same seed.
"""

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)

_EXCHANGE_SAMPLES, _EXCHANGE_SLOTS = 2, 3
"""Two of four equally likely changes of `anneal`; the two others move one sample to any slot."""


@njit(cache=True, nogil=True)
def _draw(state, bound):
    """Draw an integer below `bound` (splitmix64; `state` is a one-element uint64 array)."""
    state[0] += _GOLDEN
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    z = z ^ (z >> np.uint64(31))
    return np.int64(z % np.uint64(bound))


# Without these two flags a maximum of doubles is not vectorised; they allow no other change of the result.
@njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def place_two_units(order, first, second, slot_of, num_slots):
    """Greedy placement for two units and equal slots without limits: the benchmark's inner loop.

    Each sample, in `order`, goes to the slot where the larger of the two loads, plus a thousandth of their sum, stays
    smallest. The slot's number is kept in the lowest bits of its score, so that one integer minimum, which vectorises,
    finds the slot; scores are positive, hence ordered like their bits.
    """
    one, two, score = np.zeros(num_slots), np.zeros(num_slots), np.empty(num_slots)
    bits = score.view(np.int64)
    mask = np.int64(1)
    while mask < num_slots:
        mask *= 2
    mask -= 1
    for sample in order:
        x, y = first[sample], second[sample]
        for slot in range(num_slots):
            a, b = one[slot] + x, two[slot] + y
            score[slot] = max(a, b) + 1e-3 * (a + b)
        least = np.int64(0x7FFFFFFFFFFFFFFF)
        for slot in range(num_slots):
            least = min(least, (bits[slot] & ~mask) | slot)
        best = least & mask
        one[best] += x
        two[best] += y
        slot_of[sample] = best


_BLOCK = 32
"""Slots that share a lower bound in `place_units`."""


@njit(cache=True, nogil=True)
def _score(load, slot, share, sample, speed):
    """Return the score of a slot, or of a block by its least loads and highest speed, if it takes a sample."""
    largest, total = 0.0, 0.0
    for unit in range(len(share)):
        value = (load[slot, unit] + share[unit, sample]) / speed
        largest = max(largest, value)
        total += value
    return largest + 1e-3 * total


@njit(cache=True, nogil=True)
def place_units(order, share, speed, weight, room, slot_of):
    """Greedy placement for any number of units, slots of different `speed`, and limited `room` per slot.
    `share [units, samples]`. Returns the first sample for which no slot has room, or -1.

    Slots form blocks. Rounding is monotone, so the score by a block's least loads is at most that of any of its slots;
    blocks that cannot hold the best slot are skipped, and the result is that of trying all slots in order."""
    num_units, num_slots = len(share), len(speed)
    num_blocks = (num_slots + _BLOCK - 1) // _BLOCK
    load, least_load = np.zeros((num_slots, num_units)), np.zeros((num_blocks, num_units))
    highest, bound = np.zeros(num_blocks), np.empty(num_blocks)
    for slot in range(num_slots):
        highest[slot // _BLOCK] = max(highest[slot // _BLOCK], speed[slot])
    for sample in order:
        nearest = 0
        for block in range(num_blocks):
            bound[block] = _score(least_load, block, share, sample, highest[block])
            if bound[block] < bound[nearest]:
                nearest = block
        best, least = -1, np.inf
        for turn in range(-1, num_blocks):
            block = nearest if turn < 0 else turn
            if turn == nearest or bound[block] > least or (bound[block] == least and block * _BLOCK > best):
                continue
            for slot in range(block * _BLOCK, min((block + 1) * _BLOCK, num_slots)):
                if weight[sample] > room[slot]:
                    continue
                value = _score(load, slot, share, sample, speed[slot])
                if value < least or (value == least and slot < best):
                    best, least = slot, value
        if best < 0:
            return sample
        room[best] -= weight[sample]
        slot_of[sample] = best
        block = best // _BLOCK
        for unit in range(num_units):
            load[best, unit] += share[unit, sample]
            lowest = np.inf
            for slot in range(block * _BLOCK, min((block + 1) * _BLOCK, num_slots)):
                lowest = min(lowest, load[slot, unit])
            least_load[block, unit] = lowest
    return -1


@njit(cache=True, nogil=True)
def even_out(share, weight, capacity, slot_of, num_slots, limit, pairs):
    """Swap samples between slots, or move them, until no load of a unit is above `limit[unit]`, or nothing helps.

    `share [units, samples]` is as in `place_units`. In each round the slot furthest above its limit moves one sample to
    another slot, or swaps it, such that the larger load of the two slots is smallest. At most `pairs` pairs are tried.
    """
    num_units, num_samples = share.shape
    load = np.zeros((num_slots, num_units))
    filled = np.zeros(num_slots)
    for sample in range(num_samples):
        filled[slot_of[sample]] += weight[sample]
        for unit in range(num_units):
            load[slot_of[sample], unit] += share[unit, sample]
    while pairs > 0:
        worst, full = 1.0, -1
        for slot in range(num_slots):
            for unit in range(num_units):
                if load[slot, unit] > worst * limit[unit]:
                    worst, full = load[slot, unit] / limit[unit], slot
        if full < 0:
            return
        best, gives, takes, other = worst, -1, -1, -1
        for one in range(num_samples):
            if slot_of[one] != full:
                continue
            pairs -= num_samples + num_slots
            for partner in range(num_samples + num_slots):
                back = partner if partner < num_samples else -1
                slot = slot_of[back] if back >= 0 else partner - num_samples
                if slot == full:
                    continue
                moved = weight[one] - (weight[back] if back >= 0 else 0.0)
                if filled[slot] + moved > capacity or filled[full] - moved > capacity:
                    continue
                largest = 0.0
                for unit in range(num_units):
                    delta = share[unit, one] - (share[unit, back] if back >= 0 else 0.0)
                    largest = max(largest, (load[full, unit] - delta) / limit[unit])
                    largest = max(largest, (load[slot, unit] + delta) / limit[unit])
                if largest < best:
                    best, gives, takes, other = largest, one, back, slot
        if best >= worst * (1.0 - 1e-9):
            return
        for unit in range(num_units):
            delta = share[unit, gives] - (share[unit, takes] if takes >= 0 else 0.0)
            load[full, unit] -= delta
            load[other, unit] += delta
        moved = weight[gives] - (weight[takes] if takes >= 0 else 0.0)
        filled[full] -= moved
        filled[other] += moved
        slot_of[gives] = other
        if takes >= 0:
            slot_of[takes] = full


@njit(cache=True, nogil=True)
def descending(key):
    """Return sample numbers by descending non-negative key, equal keys (to 32 bits) by descending number."""
    mask = np.int64(1)
    while mask < key.size:
        mask *= 2
    mask -= 1
    packed = (key.view(np.int64) & ~mask) | np.arange(key.size)
    packed.sort()
    return packed[::-1] & mask


@njit(cache=True, nogil=True)
def balance(seconds, weight, capacity, slot_of, num_slots, even, pairs, packed):
    """Place samples greedily, largest first relative to a unit's mean slot. Then even slots out until each unit's
    largest load is within `even` of its bound. Returns the first sample without room, or -1.

    `seconds [samples, units]`. If the largest first leaves no room, the heaviest are first, which fits more often; else
    samples are placed in the rows `packed [samples]`."""
    num_samples, num_units = seconds.shape
    if num_samples == 0:
        return -1
    share, key, limit = np.empty((num_units, num_samples)), np.zeros(num_samples), np.empty(num_units)
    for unit in range(num_units):
        total = seconds[:, unit].sum()
        factor = num_slots / (total if total > 0.0 else 1.0)
        largest = 1.0
        for sample in range(num_samples):
            share[unit, sample] = seconds[sample, unit] * factor
            key[sample] = max(key[sample], share[unit, sample])
            largest = max(largest, share[unit, sample])
        limit[unit] = (1.0 + even) * largest
    if capacity == np.inf and num_units == 2:
        place_two_units(descending(key), share[0], share[1], slot_of, num_slots)
    else:
        equal = np.ones(num_slots)
        refused = place_units(descending(key), share, equal, weight, np.full(num_slots, capacity), slot_of)
        if refused >= 0:
            refused = place_units(descending(weight), share, equal, weight, np.full(num_slots, capacity), slot_of)
        if refused >= 0:
            if packed.max() >= num_slots:
                return refused
            slot_of[:] = packed
            _fill_slots(slot_of, packed.max() + 1, num_slots)
    if num_slots > 1:
        even_out(share, weight, capacity, slot_of, num_slots, limit, pairs)
    return -1


@njit(cache=True, nogil=True)
def _fill_slots(slot_of, used, num_slots):
    """Move samples of slots that have several to slots from `used` on, which are empty: bounds of plans count on it."""
    for slot in range(used):
        is_first = True
        for sample in range(len(slot_of)):
            if used == num_slots:
                return
            if slot_of[sample] == slot and is_first:
                is_first = False
            elif slot_of[sample] == slot:
                slot_of[sample] = used
                used += 1


@njit(cache=True, nogil=True)
def balance_replicas(seconds, scale, weight, capacity, samples, first, counts, even, pairs, packed):
    """Balance each replica by itself over `counts[replicas]` slots. Replica r has `samples[first[r]:first[r + 1]]`,
    which take `scale[r, units]` times their `seconds [samples, units]`; `packed` has their rows as in `balance`.
    Returns the slot of each entry of `samples` (empty slots are last), and False if some samples do not fit."""
    slots = np.zeros(samples.size, dtype=np.int64)
    for replica in range(len(counts)):
        mine = samples[first[replica] : first[replica + 1]]
        slot_of, count = slots[first[replica] : first[replica + 1]], counts[replica]
        own = seconds[mine] * scale[replica]
        rows = packed[first[replica] : first[replica + 1]]
        if balance(own, weight[mine], capacity, slot_of, count, even, pairs, rows) >= 0:
            return slots, False
        used = np.zeros(count, dtype=np.int64)
        used[slot_of] = 1
        slot_of[:] = (np.cumsum(used) - 1)[slot_of]
    return slots, True


@njit(cache=True, nogil=True)
def step_time(first, before, cost_of, share, last, cost, end):
    """Return the latest end of a step; fill `end` from op `first` on. Earlier entries must be valid.

    Ops are in topological order. `before [ops, n]` are each op's predecessors, padded with the number of ops, whose
    `end` is 0. Op i takes `share[i] * cost[cost_of[i]]` seconds. `last` are the ops without successors.
    """
    if before.shape[1] == 2:
        for i in range(first, len(share)):
            end[i] = max(end[before[i, 0]], end[before[i, 1]]) + share[i] * cost[cost_of[i]]
    else:
        for i in range(first, len(share)):
            time = 0.0
            for at in range(before.shape[1]):
                time = max(time, end[before[i, at]])
            end[i] = time + share[i] * cost[cost_of[i]]
    latest = 0.0
    for i in last:
        latest = max(latest, end[i])
    return latest


@njit(cache=True, nogil=True)
def _set_costs(cost, load, fixed, position, a, b):
    num_units, num_slots = load.shape
    for unit in range(num_units):
        cost[unit * num_slots + position[a]] = load[unit, a] + fixed[unit] if load[unit, a] > 0.0 else 0.0
        cost[unit * num_slots + position[b]] = load[unit, b] + fixed[unit] if load[unit, b] > 0.0 else 0.0


@njit(cache=True, nogil=True)
def _rehouse(slot_of, filled, count, weight, one, other, a, b):
    """Move sample `one` from slot a to b, and `other`, unless it is -1, from b to a."""
    moved = weight[one]
    if other >= 0:
        moved -= weight[other]
        slot_of[other] = a
    else:
        count[a] -= 1
        count[b] += 1
    slot_of[one] = b
    filled[a] -= moved
    filled[b] += moved


@njit(cache=True, nogil=True)
def _copy(source, target, first, end):
    # An explicit loop, since slice assignment takes seconds to compile.
    for i in range(first, end):
        target[i] = source[i]


@njit(cache=True, nogil=True)
def anneal(
    seconds,
    weight,
    capacity,
    slot_of,
    num_slots,
    before,
    cost_of,
    share,
    last,
    fixed,
    evaluations,
    membership,
    start_threshold,
    seed,
):
    """Threshold accepting over sample moves, sample swaps and slot swaps; the objective is the simulated step.

    `seconds [units, samples]`; `slot_of [samples]` is overwritten with the best found; `before`, `cost_of` (unit *
    slots + slot), `share`, `last` are as in `step_time`; `fixed [units]` is added to every slot in which a unit has
    work. With `membership` False only whole slots change places. A change is kept if the step gets longer by at most
    the threshold, which falls linearly from `start_threshold` times the first step to zero. Returns the best step's
    seconds.
    """
    num_units, num_samples = seconds.shape
    num_ops = len(share)
    state = np.empty(1, dtype=np.uint64)
    state[0] = np.uint64(seed)
    load = np.zeros((num_units, num_slots))
    filled = np.zeros(num_slots)
    count = np.zeros(num_slots, dtype=np.int64)
    for sample in range(num_samples):
        slot = slot_of[sample]
        filled[slot] += weight[sample]
        count[slot] += 1
        for unit in range(num_units):
            load[unit, slot] += seconds[unit, sample]
    first_op = np.empty(num_slots, dtype=np.int64)
    position = np.empty(num_slots, dtype=np.int64)
    best_position = np.empty(num_slots, dtype=np.int64)
    for slot in range(num_slots):
        first_op[slot] = num_ops
        position[slot] = slot
    for i in range(num_ops - 1, -1, -1):
        first_op[cost_of[i] % num_slots] = i
    cost = np.zeros(num_units * num_slots)
    for unit in range(num_units):
        for slot in range(num_slots):
            cost[unit * num_slots + slot] = load[unit, slot] + fixed[unit] if load[unit, slot] > 0.0 else 0.0
    end = np.zeros(num_ops + 1)
    saved = np.empty(num_ops)
    column = np.empty((num_units, 2))
    now = step_time(np.int64(0), before, cost_of, share, last, cost, end)
    best = now
    best_slot = np.empty(num_samples, dtype=np.int64)
    _copy(slot_of, best_slot, np.int64(0), num_samples)
    _copy(position, best_position, np.int64(0), num_slots)
    first_threshold = start_threshold * now
    for step in range(evaluations):
        threshold = first_threshold * (1.0 - step / evaluations)
        draw = _draw(state, np.int64(4)) if membership else _EXCHANGE_SLOTS
        one, other = -1, -1  # samples that change slots; -1: none
        if draw == _EXCHANGE_SLOTS:
            a, b = _draw(state, num_slots), _draw(state, num_slots)
        elif draw == _EXCHANGE_SAMPLES:
            one, other = _draw(state, num_samples), _draw(state, num_samples)
            a, b = slot_of[one], slot_of[other]
        else:
            one = _draw(state, num_samples)
            a, b = slot_of[one], _draw(state, num_slots)
        if a == b:
            continue
        for unit in range(num_units):
            column[unit, 0], column[unit, 1] = load[unit, a], load[unit, b]
        if one < 0:
            position[a], position[b] = position[b], position[a]
        else:
            moved = weight[one] - (weight[other] if other >= 0 else 0.0)
            if filled[b] + moved > capacity or filled[a] - moved > capacity:
                continue
            _rehouse(slot_of, filled, count, weight, one, other, a, b)
            for unit in range(num_units):
                delta = seconds[unit, one] - (seconds[unit, other] if other >= 0 else 0.0)
                load[unit, a] = max(load[unit, a] - delta, 0.0) if count[a] > 0 else 0.0
                load[unit, b] = max(load[unit, b] + delta, 0.0)
        _set_costs(cost, load, fixed, position, a, b)
        first = min(first_op[position[a]], first_op[position[b]])
        _copy(end, saved, first, num_ops)
        time = step_time(first, before, cost_of, share, last, cost, end)
        if time <= now + threshold:
            now = time
            if now < best:
                best = now
                _copy(slot_of, best_slot, np.int64(0), num_samples)
                _copy(position, best_position, np.int64(0), num_slots)
            continue
        _copy(saved, end, first, num_ops)
        if one < 0:
            position[a], position[b] = position[b], position[a]
        else:
            _rehouse(slot_of, filled, count, weight, one, other, b, a)
            for unit in range(num_units):
                load[unit, a], load[unit, b] = column[unit, 0], column[unit, 1]
        _set_costs(cost, load, fixed, position, a, b)
    for sample in range(num_samples):
        slot_of[sample] = best_position[best_slot[sample]]
    return best
