"""Compiled enumeration and transport problem of pipeline reinstantiation."""

import numpy as np
from numba import njit


@njit(cache=True)
def _nearest(rank, center, most):
    """Return the rank-th of 0..most in order of distance from `center` (at most `most`), smaller ones first."""
    both = min(center, most - center)
    if rank <= 2 * both:
        distance = (rank + 1) // 2
        return center - distance if rank % 2 else center + distance
    return center - (rank - both) if center > both else center + (rank - both)


@njit(cache=True)
def enumerate_compositions(nodes, values, have, num_nodes, fewest, total, most_found, most_steps):
    """Return (counts[found, template], True if complete): compositions that use exactly `num_nodes` nodes.
    They have between `fewest` and `total` pipelines whose values add up to at least `total`; templates of value 0 are
    omitted. Each count is tried in order of distance from `have`, so the compositions most like the running one come
    first."""
    templates = nodes.size
    value_left = np.full((templates + 1, num_nodes + 1), np.int64(-1))  # best sum of the remaining templates
    parts_left = np.full((templates + 1, num_nodes + 1), np.int64(-1))  # most pipelines of these templates
    value_left[templates, 0] = 0
    parts_left[templates, 0] = 0
    for i in range(templates - 1, -1, -1):
        for n in range(num_nodes + 1):
            value_left[i, n] = value_left[i + 1, n]
            parts_left[i, n] = parts_left[i + 1, n]
            if values[i] > 0 and n >= nodes[i] and parts_left[i, n - nodes[i]] >= 0:
                value_left[i, n] = max(value_left[i, n], value_left[i, n - nodes[i]] + values[i])
                parts_left[i, n] = max(parts_left[i, n], parts_left[i, n - nodes[i]] + 1)
    found = np.zeros((most_found, templates), np.int64)
    number = 0
    count = np.zeros(templates, np.int64)
    rank = np.full(templates + 1, np.int64(-1))
    left = np.zeros(templates + 1, np.int64)
    value = np.zeros(templates + 1, np.int64)
    parts = np.zeros(templates + 1, np.int64)
    left[0] = num_nodes
    level = 0
    for _ in range(most_steps):
        if level < 0:
            return found[:number].copy(), True
        rank[level] += 1
        most = left[level] // nodes[level] if values[level] > 0 else 0
        if rank[level] > most:
            level -= 1
            continue
        count[level] = _nearest(rank[level], min(have[level], most), most)
        n = left[level] - count[level] * nodes[level]
        value[level + 1] = value[level] + count[level] * values[level]
        parts[level + 1] = parts[level] + count[level]
        if (
            parts_left[level + 1, n] < 0
            or value[level + 1] + value_left[level + 1, n] < total
            or parts[level + 1] + parts_left[level + 1, n] < fewest
            or parts[level + 1] > total
        ):
            continue
        if level + 1 == templates:
            found[number] = count
            number += 1
            if number == most_found:
                return found, False
            continue
        level += 1
        left[level] = n
        rank[level] = -1
    return found[:number].copy(), False


@njit(cache=True)
def transport(cost, supply, demand):
    """Return flow[row, column] that moves every supply to the demands (equal sums) at minimum cost.

    The algorithm is successive shortest paths on reduced costs, several units at a time, in integers.
    """
    rows, columns = cost.shape
    flow = np.zeros((rows, columns), np.int64)
    supply = supply.copy()
    demand = demand.copy()
    row_price = np.zeros(rows, np.int64)
    column_price = np.zeros(columns, np.int64)
    infinite = np.int64(1) << 62
    for source in range(rows):
        while supply[source] > 0:
            row_distance = np.full(rows, infinite)
            column_distance = np.full(columns, infinite)
            row_from = np.full(rows, np.int64(-1))
            column_from = np.full(columns, np.int64(-1))
            row_done = np.zeros(rows, np.bool_)
            column_done = np.zeros(columns, np.bool_)
            row_distance[source] = 0
            target = -1
            while target < 0:
                row = -1
                column = -1
                nearest = infinite
                for i in range(rows):
                    if not row_done[i] and row_distance[i] < nearest:
                        nearest = row_distance[i]
                        row = i
                for j in range(columns):
                    if not column_done[j] and column_distance[j] < nearest:
                        nearest = column_distance[j]
                        column = j
                if column >= 0:
                    column_done[column] = True
                    if demand[column] > 0:
                        target = column
                        break
                    for i in range(rows):
                        if flow[i, column] > 0 and not row_done[i]:
                            reduced = row_price[i] + column_price[column] - cost[i, column]
                            if nearest + reduced < row_distance[i]:
                                row_distance[i] = nearest + reduced
                                row_from[i] = column
                else:
                    row_done[row] = True
                    for j in range(columns):
                        if not column_done[j]:
                            reduced = cost[row, j] - row_price[row] - column_price[j]
                            if nearest + reduced < column_distance[j]:
                                column_distance[j] = nearest + reduced
                                column_from[j] = row
            reach = column_distance[target]
            for i in range(rows):
                row_price[i] += reach - min(row_distance[i], reach)
            for j in range(columns):
                column_price[j] -= reach - min(column_distance[j], reach)
            amount = min(supply[source], demand[target])
            column = target
            while True:
                row = column_from[column]
                if row == source:
                    break
                column = row_from[row]
                amount = min(amount, flow[row, column])
            column = target
            while True:
                row = column_from[column]
                flow[row, column] += amount
                if row == source:
                    break
                column = row_from[row]
                flow[row, column] -= amount
            supply[source] -= amount
            demand[target] -= amount
    return flow
