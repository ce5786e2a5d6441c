"""Compiled transposition of a block table: from keys per query block to queries per key block."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, error_model="numpy")
def _walk(offsets, intervals, num_columns, fill, first, out):
    """Compare each row with the previous one, and open or close intervals of rows in the columns that changed. Without
    `fill`, count the intervals of each column into `first`; with it, write them to `out` from `first` on."""
    num_rows = offsets.shape[0] - 1
    kind_now = np.zeros(num_columns, np.int8)
    since = np.zeros(num_columns, np.int32)
    for row in range(num_rows + 1):
        i = offsets[row - 1] if row else 0
        i_end = offsets[row] if row else 0
        j = offsets[row] if row < num_rows else 0
        j_end = offsets[row + 1] if row < num_rows else 0
        at = 0
        # Iterate over ranges of columns in which neither row changes.
        while i < i_end or j < j_end:
            old = new = 0
            stop = num_columns
            if i < i_end:
                if intervals[i, 0] <= at:
                    old = intervals[i, 2]
                    stop = min(stop, intervals[i, 0] + intervals[i, 1])
                else:
                    stop = min(stop, intervals[i, 0])
            if j < j_end:
                if intervals[j, 0] <= at:
                    new = intervals[j, 2]
                    stop = min(stop, intervals[j, 0] + intervals[j, 1])
                else:
                    stop = min(stop, intervals[j, 0])
            if old != new:
                for column in range(at, stop):
                    if old and fill:
                        place = first[column]
                        out[place, 0] = since[column]
                        out[place, 1] = row - since[column]
                        out[place, 2] = kind_now[column]
                    if old:
                        first[column] += 1
                    kind_now[column] = new
                    since[column] = row
            at = stop
            if i < i_end and intervals[i, 0] + intervals[i, 1] <= at:
                i += 1
            if j < j_end and intervals[j, 0] + intervals[j, 1] <= at:
                j += 1


@njit(cache=True, error_model="numpy")
def transpose(offsets, intervals, num_columns):
    """Return offsets `[columns + 1]` and intervals (first row, rows, kind), int32 `[n, 3]`, of the transposed table.

    Time and memory are proportional to the changes between rows, not to rows x columns.
    """
    new_offsets = np.zeros(num_columns + 1, np.int64)
    out = np.empty((0, 3), np.int32)
    _walk(offsets, intervals, num_columns, False, new_offsets[1:], out)
    for column in range(num_columns):
        new_offsets[column + 1] += new_offsets[column]
    out = np.empty((new_offsets[num_columns], 3), np.int32)
    _walk(offsets, intervals, num_columns, True, new_offsets[:-1].copy(), out)
    return new_offsets, out
