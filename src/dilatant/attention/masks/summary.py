"""Block classification from summaries, for masks so ragged that sweeping their runs would cost tokens x tokens.

Each block is summarised per kind of query word (CAUSAL, LOCAL, WINDOW, TOGETHER set or not) by the intersection and the
union or range of its tokens' fields, and each pair of blocks is classified from two summaries. Results "empty" and
"full" are always right; some empty and full blocks are classified as partial. Time is blocks x blocks; memory is that
of the intervals.
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

_KINDS = 16
_EMPTY, _PARTIAL, _FULL = 0, 1, 2

_SUMMARY = np.dtype(
    [
        (name, np.int64)
        for name in (
            "tokens",
            "any_own",
            "padded",
            "any_attend",
            "all_attend",
            "low_sample",
            "high_sample",
            "plain",  # has tokens of instance 0; the two fields below cover other instances
            "low_instance",
            "high_instance",
            "low_position",
            "high_position",
        )
    ]
)


@njit(cache=True)
def _kind(word):
    """Return which of the 16 kinds a query word is: bits 60 to 62 (WINDOW, LOCAL, CAUSAL), and TOGETHER as bit 3."""
    return (word >> 60) & 7 | (8 if word & _TOGETHER else 0)


@njit(cache=True)
def _summaries(runs, block, num_blocks, by_kind):
    """Return one summary per block, or with `by_kind` per block and kind of word: `[blocks, kinds]`."""
    result = np.zeros((num_blocks, _KINDS if by_kind else 1), _SUMMARY)
    for run in range(runs.shape[1]):
        token, length, word, position = runs[:, run]
        end = token + length
        sample = (word >> _SAMPLE_SHIFT) & _SAMPLES
        instance = (word >> _INSTANCE_SHIFT) & _INSTANCES
        attend = (word >> _ATTEND_SHIFT) & _OWN
        while token < end:
            piece = min(end, (token // block + 1) * block) - token
            summary = result[token // block, _kind(word) if by_kind else 0]
            if summary.tokens == 0:
                summary.all_attend = attend
                summary.low_sample = summary.high_sample = sample
                summary.low_instance = _INSTANCES + 1
                summary.high_instance = 0
                summary.low_position = position
                summary.high_position = position
            summary.tokens += piece
            summary.any_own |= word & _OWN
            summary.padded |= word & _OWN == 0
            summary.any_attend |= attend
            summary.all_attend &= attend
            summary.low_sample = min(summary.low_sample, sample)
            summary.high_sample = max(summary.high_sample, sample)
            if instance == 0:
                summary.plain = True
            else:
                summary.low_instance = min(summary.low_instance, instance)
                summary.high_instance = max(summary.high_instance, instance)
            summary.low_position = min(summary.low_position, position)
            summary.high_position = max(summary.high_position, position + piece - 1)
            token += piece
            position += piece
    return result


@njit(cache=True)
def _may_see(query, key, kind, window):
    """Return whether some token of `query` might see some token of `key`."""
    if query.low_sample > key.high_sample or query.high_sample < key.low_sample:
        return False
    causal = kind & 4 != 0
    if window >= 0 and kind & 1:
        if key.high_position <= query.low_position - window:
            return False
        if not causal and key.low_position >= query.high_position + window:
            return False
    meets = query.low_instance <= key.high_instance and query.high_instance >= key.low_instance
    meets = meets or (query.plain and key.plain)
    if kind & 2 and not meets:
        return False
    if kind & 8 and meets and query.any_own & key.any_own:
        return True
    return query.any_attend & key.any_own != 0 and not (causal and key.low_position > query.high_position)


@njit(cache=True)
def _sees_all(query, key, kind, window):
    """Return whether every token of `query` certainly sees every token of `key`."""
    if query.low_sample != key.high_sample or query.high_sample != key.low_sample:
        return False
    if key.padded or key.any_own & ~query.all_attend:
        return False
    if kind & 2:
        if query.plain != key.plain:
            return False
        if query.plain and (query.high_instance or key.high_instance):
            return False
        if not query.plain and (
            query.low_instance != key.high_instance or query.high_instance != key.low_instance
        ):
            return False
    causal = kind & 4 != 0
    if causal and key.high_position > query.low_position:
        return False
    if window >= 0 and kind & 1:
        if key.low_position <= query.high_position - window:
            return False
        if not causal and key.high_position >= query.low_position + window:
            return False
    return True


@njit(cache=True)
def classify(query_runs, key_runs, window, query_block, key_block, query_tokens, key_tokens, store):
    """Return offsets, intervals and counts as `sweep.sweep` does, sound but not exact; block sizes are in tokens."""
    num_rows = (query_tokens + query_block - 1) // query_block
    num_columns = (key_tokens + key_block - 1) // key_block
    queries = _summaries(query_runs, query_block, num_rows, True)
    keys = _summaries(key_runs, key_block, num_columns, False)
    offsets = np.zeros(num_rows + 1, np.int64)
    counts = np.zeros((num_rows, 2), np.int64)
    intervals = np.empty((num_columns, 3), np.int32)
    used = 0
    for row in range(num_rows):
        if used + num_columns > intervals.shape[0]:
            larger = np.empty((2 * intervals.shape[0] + num_columns, 3), np.int32)
            larger[:used] = intervals[:used]
            intervals = larger
        previous = _EMPTY
        for column in range(num_columns):
            key = keys[column, 0]
            some, every = False, True
            for kind in range(_KINDS):
                query = queries[row, kind]
                if query.tokens:
                    some = some or _may_see(query, key, kind, window)
                    every = every and _sees_all(query, key, kind, window)
            found = _FULL if every else _PARTIAL if some else _EMPTY
            if found != _EMPTY:
                counts[row, 0 if found == _FULL else 1] += 1
            if store and found != _EMPTY:
                if found == previous:
                    intervals[used - 1, 1] += 1
                else:
                    intervals[used, 0] = column
                    intervals[used, 1] = 1
                    intervals[used, 2] = found
                    used += 1
            previous = found
        offsets[row + 1] = used
    return offsets, intervals[:used], counts
