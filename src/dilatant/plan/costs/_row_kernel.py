"""Inner loop of the packing of samples into rows, compiled by numba and cached on disk."""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def pack(sizes, capacity, row_of):
    """Set the row of each sample, `[samples]`, as `pack_rows` does, and return the number of rows."""
    free, rows = np.empty(len(sizes)), 0
    for at in np.argsort(-sizes, kind="mergesort"):
        best = -1
        for row in range(rows):
            if sizes[at] <= free[row] and (best < 0 or free[row] < free[best]):
                best = row
        if best < 0:
            best, free[rows] = rows, capacity
            rows += 1
        free[best] -= sizes[at]
        row_of[at] = best
    number, used = np.full(rows, -1), 0
    for at in range(len(sizes)):  # rows keep the order of their first samples
        if number[row_of[at]] < 0:
            number[row_of[at]] = used
            used += 1
        row_of[at] = number[row_of[at]]
    return rows
