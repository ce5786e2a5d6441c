"""Compiled sweep that classifies blocks of query and key tokens from runs.

For each query block the sweep holds two sorted lists of key-token intervals: *any*, seen by at least one of the block's
tokens, and *all*, seen by every one of them. A key block is empty if it misses *any*, full if it lies inside *all*,
else partial. Both lists are exact: within a run the word is constant and positions are consecutive, so over a stretch
of consecutive key positions the union and the intersection of what the run's tokens see are intervals again.

Keys are grouped into stretches once per (sample, attended modalities), not once per run, so ordinary masks cost a
constant per query block. Intervals of tokens are pairs (start, end), end exclusive; intervals of blocks are triples
(start, length, kind).

Compiled functions that call each other share this long file, because numba's cache checks for changes only in the file
of the function called, not in the files of its callees. Counters that these are given begin as `np.int64(0)`: for a
literal 0 numba compiles the callee once more.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dilatant.attention.masks import mask as layout

_OWN = layout.OWN
_ATTEND_SHIFT = layout.ATTEND_SHIFT
_INSTANCE_SHIFT = layout.INSTANCE_SHIFT
_INSTANCES = layout.MAX_INSTANCES - 1
_SAMPLE_SHIFT = layout.SAMPLE_SHIFT
_SAMPLES = layout.MAX_SAMPLES - 1
_TOGETHER = layout.TOGETHER
_WINDOW = layout.WINDOW
_LOCAL = layout.LOCAL
_CAUSAL = layout.CAUSAL

PARTIAL = 1
FULL = 2

_FAR = 1 << 40
"""Larger than any position, and small enough that adding a position cannot overflow."""


@njit(cache=True, error_model="numpy")
def _grown(array, size):
    """Copy into an array with at least `size` rows; by a loop, since slices add ten seconds to numba's compile time."""
    rows, columns = array.shape
    larger = np.empty((max(size, 2 * rows), columns), array.dtype)
    for row in range(rows):
        for column in range(columns):
            larger[row, column] = array[row, column]
    return larger


@njit(cache=True, error_model="numpy")
def _block_of(token, block):
    """Return the token's block. A block size is (tokens, log2 of tokens or -1): shifting halves the sweep's time."""
    return token >> block[1] if block[1] >= 0 else token // block[0]


@njit(cache=True, error_model="numpy")
def _blocks_before(token, block):
    """Return how many blocks begin before the token."""
    return _block_of(token + block[0] - 1, block)


@njit(cache=True, error_model="numpy")
def _counting_order(order, values, num_values):
    """Return `order` stably sorted by `values[order]`, and where each value begins."""
    first = np.zeros(num_values + 1, np.int64)
    for run in order:
        first[values[run] + 1] += 1
    for value in range(num_values):
        first[value + 1] += first[value]
    free = first.copy()
    result = np.empty(order.shape[0], np.int64)
    for run in order:
        value = values[run]
        result[free[value]] = run
        free[value] += 1
    return result, first


@njit(cache=True, error_model="numpy")
def _lower_bound(values, order, low, high, value):
    while low < high:
        middle = (low + high) // 2
        if values[order[middle]] < value:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, error_model="numpy")
def _append_stretches(stretches, used, order, low, high, wanted, runs):
    """Append the runs of `order[low:high]` with modalities in `wanted`, joined if tokens and positions are contiguous.

    `runs` are start, length, word and position of all runs. A stretch is (first token, end token, first position). The
    caller has made room. Returns the number of stretches.
    """
    start, length, field, position = runs
    begin = used
    for place in range(low, high):
        run = order[place]
        if field[run] & _OWN & wanted == 0:
            continue
        first, end, at = start[run], start[run] + length[run], position[run]
        last = used - 1
        if used > begin and stretches[last, 1] == first and stretches[last, 2] + first - stretches[last, 0] == at:
            stretches[last, 1] = end
            continue
        stretches[used, 0] = first
        stretches[used, 1] = end
        stretches[used, 2] = at
        used += 1
    return used


@njit(cache=True, error_model="numpy")
def _clip(stretches, low, high, lowest, beyond, out):
    """Write to `out` the parts of the stretches at positions `lowest <= p < beyond`; touching parts are joined."""
    count = 0
    for place in range(low, high):
        first, at = stretches[place, 0], stretches[place, 2]
        start = first + max(0, lowest - at)
        end = min(stretches[place, 1], first + beyond - at)
        if start >= end:
            continue
        if count and out[count - 1, 1] == start:
            out[count - 1, 1] = end
        else:
            out[count, 0] = start
            out[count, 1] = end
            count += 1
    return count


@njit(cache=True, error_model="numpy")
def _copy(source, count, target):
    for place in range(count):  # faster than slices for lists of a few entries
        target[place, 0] = source[place, 0]
        target[place, 1] = source[place, 1]


@njit(cache=True, error_model="numpy")
def _widen(a, num_a, b, num_b, out):
    """Replace the intervals of `a` by the union with those of `b`; `out` is scratch space."""
    count = i = j = 0
    while i < num_a or j < num_b:
        if j == num_b or (i < num_a and a[i, 0] <= b[j, 0]):
            start, end = a[i, 0], a[i, 1]
            i += 1
        else:
            start, end = b[j, 0], b[j, 1]
            j += 1
        if count and start <= out[count - 1, 1]:
            out[count - 1, 1] = max(out[count - 1, 1], end)
        else:
            out[count, 0] = start
            out[count, 1] = end
            count += 1
    _copy(out, count, a)
    return count


@njit(cache=True, error_model="numpy")
def _narrow(a, num_a, b, num_b, out):
    """Replace the intervals of `a` by the intersection with those of `b`; `out` is scratch space."""
    count = i = j = 0
    while i < num_a and j < num_b:
        start = max(a[i, 0], b[j, 0])
        end = min(a[i, 1], b[j, 1])
        if start < end:
            out[count, 0] = start
            out[count, 1] = end
            count += 1
        if a[i, 1] < b[j, 1]:
            i += 1
        else:
            j += 1
    _copy(out, count, a)
    return count


@njit(cache=True, error_model="numpy")
def _move(intervals, source, target):
    for part in range(3):
        intervals[target, part] = intervals[source, part]


@njit(cache=True, error_model="numpy")
def _coalesce(intervals, low, high, most):
    """Join neighbours among `intervals[low:high]` as partial until at most `most` remain, cheapest first: the cost is
    the full blocks that must now be masked, plus twice the empty ones now visited."""
    limit = 1
    while high - low > most:
        used = low
        for place in range(low + 1, high):
            gap = intervals[place, 0] - intervals[used, 0] - intervals[used, 1]
            cost = 2 * gap
            for part in (used, place):
                if intervals[part, 2] == FULL:
                    cost += intervals[part, 1]
            if cost <= limit:
                intervals[used, 1] += gap + intervals[place, 1]
                intervals[used, 2] = PARTIAL
            else:
                used += 1
                _move(intervals, place, used)
        high = used + 1
        limit *= 2
    return high


@njit(cache=True, error_model="numpy")
def _emit(some, num_some, every, num_every, block, num_tokens, intervals, used):
    """Append the key-block intervals (start, length, kind) of one query block; the caller has made room. Returns how
    many intervals there are now, and the numbers of full and of partial key blocks appended."""
    full = partial = 0
    place = done = 0
    full_start = full_end = 0
    for i in range(num_some):
        start = max(done, _block_of(some[i, 0], block))
        end = _blocks_before(some[i, 1], block)
        if start >= end:
            continue
        # A token interval may begin inside the block in which the previous one ended.
        while start < end:
            while place < num_every:
                full_start = _blocks_before(every[place, 0], block)
                last = every[place, 1]
                full_end = _blocks_before(last, block) if last == num_tokens else _block_of(last, block)
                if full_end > start and full_start < full_end:
                    break
                place += 1
            if place == num_every or full_start >= end:
                stop, kind = end, PARTIAL
            elif full_start > start:
                stop, kind = full_start, PARTIAL
            else:
                stop, kind = min(end, full_end), FULL
            if kind == FULL:
                full += stop - start
            else:
                partial += stop - start
            tail = used - 1
            if done == start and full + partial > stop - start and intervals[tail, 2] == kind:
                intervals[tail, 1] += stop - start
            else:
                intervals[used, 0] = start
                intervals[used, 1] = stop - start
                intervals[used, 2] = kind
                used += 1
            start = done = stop
    return used, full, partial


@njit(cache=True, error_model="numpy")
def _bounds(first, beyond, causal, window):
    """Return the key position ranges that some and that all tokens at positions `first <= p < beyond` see."""
    some_lowest = every_lowest = -_FAR
    some_beyond = every_beyond = _FAR
    if window >= 0:
        some_lowest, every_lowest = first - window + 1, beyond - window
        some_beyond, every_beyond = beyond - 1 + window, first + window
    if causal:
        some_beyond, every_beyond = beyond, first + 1
    return some_lowest, some_beyond, every_lowest, every_beyond


@njit(cache=True, error_model="numpy")
def _sweep_run(piece, causal, window, stretches, bounds, buffers, filled, sizes, store, most, table, used):
    """Process some tokens of one run, block by block; the caller has made room for entries and intervals.

    `piece`: the first token, the end and the first position. `bounds`: `stretches[group_low:group_high]` are the keys
    that the run attends to, `stretches[own_low:own_high]` its own instance if that is seen as a whole. `buffers`:
    `some` and `every` hold the results of the open block's earlier runs, as many as `filled`; the others are for
    temporary results. `sizes`: blocks and numbers of tokens of queries and keys. `table`: intervals, offsets and
    counts. Returns the number of intervals, the fill of `some` and `every`, and whether nothing was joined.
    """
    token, end, position = piece
    group_low, group_high, own_low, own_high = bounds
    some, every, seen, seen_own, room = buffers
    num_some, num_every = filled
    query_block, query_tokens, key_block, key_tokens = sizes
    intervals, offsets, counts = table
    size = query_block[0]
    exact = True
    while token < end:
        block = _block_of(token, query_block)
        piece_end = min(end, (block + 1) * size)
        some_lowest, some_beyond, every_lowest, every_beyond = _bounds(
            position, position + piece_end - token, causal, window
        )
        if token == block * size:
            num_some = _clip(stretches, group_low, group_high, some_lowest, some_beyond, some)
            num_every = _clip(stretches, group_low, group_high, every_lowest, every_beyond, every)
            if own_low < own_high:
                reach = _FAR if causal else some_beyond
                num_own = _clip(stretches, own_low, own_high, some_lowest, reach, seen_own)
                num_some = _widen(some, num_some, seen_own, num_own, room)
                reach = _FAR if causal else every_beyond
                num_own = _clip(stretches, own_low, own_high, every_lowest, reach, seen_own)
                num_every = _widen(every, num_every, seen_own, num_own, room)
        else:
            num_seen = _clip(stretches, group_low, group_high, some_lowest, some_beyond, seen)
            num_some = _widen(some, num_some, seen, num_seen, room)
            num_seen = _clip(stretches, group_low, group_high, every_lowest, every_beyond, seen)
            if own_low < own_high:
                reach = _FAR if causal else some_beyond
                num_own = _clip(stretches, own_low, own_high, some_lowest, reach, seen_own)
                num_some = _widen(some, num_some, seen_own, num_own, room)
                reach = _FAR if causal else every_beyond
                num_own = _clip(stretches, own_low, own_high, every_lowest, reach, seen_own)
                num_seen = _widen(seen, num_seen, seen_own, num_own, room)
            num_every = _narrow(every, num_every, seen, num_seen, room)

        position += piece_end - token
        token = piece_end
        if token == (block + 1) * size or token == query_tokens:
            first = used if store else np.int64(0)
            used, full, partial = _emit(some, num_some, every, num_every, key_block, key_tokens, intervals, first)
            counts[block, 0] = full
            counts[block, 1] = partial
            if store and used - first > most:
                used = _coalesce(intervals, first, used, most)
                exact = False
            offsets[block + 1] = used
    return used, num_some, num_every, exact


@njit(cache=True, error_model="numpy")
def sweep(query_runs, key_runs, window, query_block, key_block, query_tokens, key_tokens, store, most, budget):
    """Classify every pair of blocks.

    Runs are int64 `[4, runs]`: start, length, word, position. Blocks are (tokens, log2 of tokens or -1). `window` is -1
    for none. With `store` the intervals are stored, at most `most` per query block; beyond that, neighbours are joined
    as partial. After `budget` steps the sweep gives up, since the masks are too ragged for it.

    Returns whether it finished; whether nothing was joined; offsets `[blocks + 1]` into the intervals; the intervals
    (first key block, key blocks, kind), int32 `[n, 3]`; and the full and partial key blocks `[blocks, 2]` of each query
    block, counted before joining.
    """
    runs = key_runs[0], key_runs[1], key_runs[2], key_runs[3]
    field = runs[2]
    sample_of = (field >> _SAMPLE_SHIFT) & _SAMPLES
    instance_of = (field >> _INSTANCE_SHIFT) & _INSTANCES
    attendable = np.flatnonzero(field & _OWN)
    num_instances = num_samples = np.int64(1)
    for key_run in attendable:
        num_instances = max(num_instances, instance_of[key_run] + 1)
        num_samples = max(num_samples, sample_of[key_run] + 1)
    by_sample, sample_first = _counting_order(attendable, sample_of, num_samples)
    by_instance, _ = _counting_order(attendable, instance_of, num_instances)
    by_instance, _ = _counting_order(by_instance, sample_of, num_samples)

    # Stretches per (sample, attended modalities) are built once and looked up in a list per sample; those of a single
    # instance are rebuilt after them.
    stretches = np.empty((4 * by_sample.shape[0] + 16, 3), np.int64)
    used_stretches = np.int64(0)
    newest_view = np.full(num_samples, -1, np.int64)
    views = np.empty((16, 4), np.int64)  # attended, first stretch, end stretch, next older view
    used_views = 0

    num_blocks = _blocks_before(query_tokens, query_block)
    offsets = np.zeros(num_blocks + 1, np.int64)
    counts = np.zeros((num_blocks, 2), np.int64)
    intervals = np.empty((4 * num_blocks + 16 if store else 64, 3), np.int32)
    used = np.int64(0)
    exact = True
    some = np.empty((16, 2), np.int64)
    every = np.empty((16, 2), np.int64)
    seen = np.empty((16, 2), np.int64)
    seen_own = np.empty((16, 2), np.int64)
    room = np.empty((16, 2), np.int64)
    num_some = num_every = np.int64(0)
    found_low = found_high = 0
    steps = 0

    for run in range(query_runs.shape[1]):
        token, word, at = query_runs[0, run], query_runs[2, run], query_runs[3, run]
        run_end = token + query_runs[1, run]
        sample = (word >> _SAMPLE_SHIFT) & _SAMPLES
        attended = (word >> _ATTEND_SHIFT) & _OWN
        low = high = 0
        if sample < num_samples:
            low, high = sample_first[sample], sample_first[sample + 1]
        if word & (_LOCAL | _TOGETHER):
            # Images are mostly in the order of their numbers: the next begins where the last ended.
            instance = (word >> _INSTANCE_SHIFT) & _INSTANCES
            found_low = found_high
            if (
                not low < found_low < high
                or instance_of[by_instance[found_low]] != instance
                or instance_of[by_instance[found_low - 1]] == instance
            ):
                found_low = _lower_bound(instance_of, by_instance, low, high, instance)
            found_high = found_low
            while found_high < high and instance_of[by_instance[found_high]] == instance:
                found_high += 1

        if used_stretches + 2 * (high - low) > stretches.shape[0]:
            stretches = _grown(stretches, used_stretches + 2 * (high - low))
        group_low = group_high = used_stretches
        if attended and word & _LOCAL:
            group_high = _append_stretches(stretches, group_low, by_instance, found_low, found_high, attended, runs)
            steps += found_high - found_low
        elif attended and low < high:
            view = newest_view[sample]
            while view >= 0 and views[view, 0] != attended:
                view = views[view, 3]
                steps += 1
            if view < 0:
                if used_views == views.shape[0]:
                    views = _grown(views, used_views + 1)
                view = used_views
                used_views += 1
                views[view, 0] = attended
                views[view, 1] = used_stretches
                used_stretches = _append_stretches(stretches, used_stretches, by_sample, low, high, attended, runs)
                views[view, 2] = used_stretches
                views[view, 3] = newest_view[sample]
                newest_view[sample] = view
                steps += high - low
            group_low, group_high = views[view, 1], views[view, 2]
        own_low = own_high = max(used_stretches, group_high)
        if word & _TOGETHER and word & _OWN:
            if own_low + high - low > stretches.shape[0]:
                stretches = _grown(stretches, own_low + high - low)
            own_high = _append_stretches(stretches, own_low, by_instance, found_low, found_high, word & _OWN, runs)
            steps += found_high - found_low

        causal = word & _CAUSAL != 0
        width = window if word & _WINDOW else -1
        new = group_high - group_low + own_high - own_low
        # Make room for the open block's entries and those of this run; and for the intervals of several blocks at a
        # time, since a block adds at most two per token interval, plus one.
        most_seen = new + max(num_some, num_every)
        if most_seen > some.shape[0]:
            some = _grown(some, most_seen)
            every = _grown(every, most_seen)
            seen = np.empty_like(some)
            seen_own = np.empty_like(some)
            room = np.empty_like(some)
        per_block = 2 * (2 * new + num_some + num_every) + 1
        blocks_at_once = max(1, 8192 // per_block)
        while token < run_end:
            end = min(run_end, (_block_of(token, query_block) + blocks_at_once) * query_block[0])
            blocks = _blocks_before(end, query_block) - _block_of(token, query_block)
            steps += (new + num_some + num_every) * blocks
            if steps > budget:
                return False, False, offsets, intervals[:0], counts
            most_intervals = used + per_block * (blocks if store else 1)
            if most_intervals > intervals.shape[0]:
                intervals = _grown(intervals, most_intervals)
            used, num_some, num_every, unjoined = _sweep_run(
                (token, end, at),
                causal,
                width,
                stretches,
                (group_low, group_high, own_low, own_high),
                (some, every, seen, seen_own, room),
                (num_some, num_every),
                (query_block, query_tokens, key_block, key_tokens),
                store,
                most,
                (intervals, offsets, counts),
                used,
            )
            exact = exact and unjoined
            at += end - token
            token = end
    return True, exact, offsets, intervals[:used] if store else intervals[:0], counts


@njit(cache=True, error_model="numpy")
def join_nearest(offsets, intervals, most):
    """Return offsets and intervals with at most `most` intervals per row, and whether nothing had to be joined."""
    result = intervals.copy()
    new_offsets = np.zeros_like(offsets)
    used = np.int64(0)
    exact = True
    for row in range(offsets.shape[0] - 1):
        first = used
        for place in range(offsets[row], offsets[row + 1]):
            _move(result, place, used)
            used += 1
        if used - first > most:
            used = _coalesce(result, first, used, most)
            exact = False
        new_offsets[row + 1] = used
    return new_offsets, result[:used], exact
