"""Entrain's inner loops: subset sums of one microbatch, bottleneck matching and least-cost matching."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def reachable_sums(units, size):
    """Return `last[s]`: the sample that first reached sum s of `units`, -1 if unreached, -2 for the empty sum.

    Samples are added one by one, so following `last` downwards never uses a sample twice.
    """
    last = np.empty(size + 1, dtype=np.int32)
    for total in range(size + 1):
        last[total] = -1
    last[0] = -2
    for sample in range(len(units)):
        step = units[sample]
        if step == 0:
            continue
        for total in range(size, step - 1, -1):
            if last[total] == -1 and last[total - step] != -1:
                last[total] = sample
    return last


@njit(cache=True, nogil=True)
def closest_sums(last, units, seconds, targets):
    """Return, for each target, the nearest reached sum (the smaller of two) and the seconds of its samples."""
    nearest = np.zeros(len(targets), dtype=np.int64)
    moved = np.zeros(len(targets))
    for number in range(len(targets)):
        target = targets[number]
        if target <= 0.0:
            continue
        least = np.inf
        for total in range(len(last)):
            if last[total] != -1 and abs(total - target) < least:
                least, nearest[number] = abs(total - target), total
        total = nearest[number]
        while total > 0:
            moved[number] += seconds[last[total]]
            total -= units[last[total]]
    return nearest, moved


@njit(cache=True, nogil=True)
def matchable(allowed, must):
    """Return whether a matching gives every row in `must` a column of `allowed[row, column]` (Kuhn's algorithm)."""
    rows, columns = allowed.shape
    owner = np.empty(columns, dtype=np.int64)
    for column in range(columns):
        owner[column] = -1
    seen = np.zeros(columns, dtype=np.int64)
    stack_row = np.empty(rows + 1, dtype=np.int64)
    stack_column = np.empty(rows + 1, dtype=np.int64)
    for start in range(rows):
        if not must[start]:
            continue
        depth, found = 0, False
        stack_row[0], stack_column[0] = start, 0
        while depth >= 0:
            row, column = stack_row[depth], stack_column[depth]
            advanced = False
            while column < columns:
                if allowed[row, column] and seen[column] != start + 1:
                    seen[column] = start + 1
                    stack_column[depth] = column
                    if owner[column] < 0:
                        found = True
                    else:
                        depth += 1
                        stack_row[depth], stack_column[depth] = owner[column], 0
                    advanced = True
                    break
                column += 1
            if found:
                break
            if not advanced:
                depth -= 1
                if depth >= 0:
                    stack_column[depth] += 1
        if not found:
            return False
        for at in range(depth, -1, -1):
            owner[stack_column[at]] = stack_row[at]
    return True


@njit(cache=True, nogil=True)
def least_cost_matching(cost):
    """Return each row's column in a perfect matching of least total cost (square; shortest augmenting paths)."""
    n = len(cost)
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    owner = np.zeros(n + 1, dtype=np.int64)
    way = np.zeros(n + 1, dtype=np.int64)
    slack = np.empty(n + 1)
    used = np.empty(n + 1, dtype=np.bool_)
    for row in range(1, n + 1):
        owner[0] = row
        column = 0
        for other in range(n + 1):
            slack[other], used[other] = np.inf, False
        while owner[column] != 0:
            used[column] = True
            current, least, following = owner[column], np.inf, 0
            for other in range(1, n + 1):
                if not used[other]:
                    reduced = cost[current - 1, other - 1] - row_price[current] - column_price[other]
                    if reduced < slack[other]:
                        slack[other], way[other] = reduced, column
                    if slack[other] < least:
                        least, following = slack[other], other
            for other in range(n + 1):
                if used[other]:
                    row_price[owner[other]] += least
                    column_price[other] -= least
                else:
                    slack[other] -= least
            column = following
        while column != 0:
            owner[column] = owner[way[column]]
            column = way[column]
    result = np.empty(n, dtype=np.int64)
    for column in range(1, n + 1):
        result[owner[column] - 1] = column - 1
    return result
