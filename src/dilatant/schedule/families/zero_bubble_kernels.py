"""Compiled loop that splits backwards, cached on disk; importing this module imports numba."""

from __future__ import annotations

import numpy as np
from numba import njit

_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = 0, 1, 2, 3


@njit(cache=True, nogil=True)
def _weight_gradient(row, at, stage, piece, held, owed, new_kind, new_stage, new_piece):
    """Write the weight half of the backward `row` at `at`; return the position after it."""
    held[stage[row]] -= 1
    owed[stage[row]] -= 1
    new_kind[at], new_stage[at], new_piece[at] = _WEIGHT_GRADIENT, stage[row], piece[row]
    return at + 1


@njit(cache=True, nogil=True)
def split_rows(offsets, kind, stage, piece, splits, limits):
    """Return the packed rows of `split_backward`: offsets [ranks + 1], kind, stage, piece [rows]. `splits` and `limits`
    are by stage: whether its backwards are split, and how many pieces it may hold."""
    count = len(kind)
    for row in range(len(kind)):
        count += kind[row] == _BACKWARD and splits[stage[row]]
    new_offsets = np.zeros(len(offsets), dtype=np.int64)
    new_kind = np.empty(count, dtype=np.int8)
    new_stage, new_piece = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.int32)
    new = new_kind, new_stage, new_piece
    waiting = np.empty(len(kind), dtype=np.int64)  # rows of backwards with pending weight gradients
    held = np.zeros(len(splits), dtype=np.int64)
    owed = np.zeros(len(splits), dtype=np.int64)
    at = 0
    for rank in range(len(offsets) - 1):
        oldest = newest = forwards = 0
        for row in range(offsets[rank], offsets[rank + 1]):
            forwards += kind[row] == _FORWARD
            held[stage[row]] = owed[stage[row]] = 0
        for row in range(offsets[rank], offsets[rank + 1]):
            own = stage[row]
            forward = kind[row] == _FORWARD
            split = kind[row] == _BACKWARD and splits[own]
            if forward:
                forwards -= 1
                while held[own] >= limits[own] and owed[own] > 0:
                    at = _weight_gradient(waiting[oldest], at, stage, piece, held, owed, *new)
                    oldest += 1
                held[own] += splits[own]
            new_kind[at], new_stage[at], new_piece[at] = kind[row], own, piece[row]
            if split:
                new_kind[at] = _INPUT_GRADIENT
                waiting[newest] = row
                newest += 1
                owed[own] += 1
            at += 1
            if split and forwards == 0:
                at = _weight_gradient(waiting[oldest], at, stage, piece, held, owed, *new)
                oldest += 1
        for index in range(oldest, newest):
            at = _weight_gradient(waiting[index], at, stage, piece, held, owed, *new)
        new_offsets[rank + 1] = at
    return new_offsets, new_kind, new_stage, new_piece
