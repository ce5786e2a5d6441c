"""Compiled option tables and joins of DistTrain's disaggregated orchestration.

An option is a layout of one module: (GPUs, seconds of a stage, warm-up seconds, depth). Smaller is better in all four.
The depth of a module before the language model is minus the number of stages that may follow it in memory; the depth of
a module after the language model is its own number of stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

ANY_DEPTH = -(1 << 40)


class ModuleLayouts(NamedTuple):
    """Layouts of a module, by ascending GPUs. seconds: of the whole module for one sample; share: fraction of the
    layers in the largest stage."""

    gpus: NDArray[np.int64]
    replicas: NDArray[np.int64]
    tp: NDArray[np.int64]
    pp: NDArray[np.int64]
    seconds: NDArray[np.float64]
    share: NDArray[np.float64]


class ModuleBytes(NamedTuple):
    """Bytes of a whole module: its state, the part that replicas shard, and the activations of a sample."""

    state: float
    optimizer: float
    activation: float


@njit(cache=True)
def frontier(ways, held, capacity, divided, samples, after, most, keep_stages):
    """Return (kept rows, their options): Pareto-optimal layouts, by ascending GPUs.

    `divided` are the language model's replicas, `samples` those of one of its microbatches, `most` the microbatches of
    a step. With `keep_stages` an option with fewer stages is not dominated, because modules before it keep fewer
    microbatches.
    """
    gpus, replicas, tp, pp, seconds, share = ways
    kept = np.empty(gpus.size, np.int64)
    options = np.empty((gpus.size, 4))
    number = 0
    for row in range(gpus.size):
        merged = samples * (divided / replicas[row])
        warm = seconds[row] * merged
        stage = warm * share[row]
        free = capacity - (held.state + held.optimizer / replicas[row]) * share[row] / tp[row]
        each = held.activation * merged * share[row] / tp[row]
        if free < 0.0:
            continue
        in_flight = most if each * most <= free else np.int64(free / each)
        if in_flight < min(pp[row], most):
            continue
        if after:
            depth = pp[row]
        else:
            depth = ANY_DEPTH if in_flight >= most else pp[row] - in_flight
        dominated = False
        for k in range(number):
            if (
                options[k, 1] <= stage
                and options[k, 2] <= warm
                and options[k, 3] <= depth
                and (not keep_stages or pp[kept[k]] <= pp[row])
            ):
                dominated = True
                break
        if not dominated:
            kept[number] = row
            options[number, 0] = gpus[row]
            options[number, 1] = stage
            options[number, 2] = warm
            options[number, 3] = depth
            number += 1
    return kept[:number].copy(), options[:number].copy()


@njit(cache=True)
def combine(one, other, budget):
    """Return Pareto-optimal sums of two option tables on at most `budget` GPUs: (rows of each, options)."""
    size = one.shape[0] * other.shape[0]
    options = np.empty((size, 4))
    code = np.empty(size, np.int64)
    count = 0
    for i in range(one.shape[0]):
        for j in range(other.shape[0]):
            if one[i, 0] + other[j, 0] <= budget:
                options[count, 0] = one[i, 0] + other[j, 0]
                options[count, 1] = max(one[i, 1], other[j, 1])
                options[count, 2] = one[i, 2] + other[j, 2]
                options[count, 3] = max(one[i, 3], other[j, 3])
                code[count] = i * other.shape[0] + j
                count += 1
    order = np.argsort(options[:count, 0], kind="mergesort")
    kept = np.empty(count, np.int64)
    number = 0
    for row in order:
        dominated = False
        for k in range(number):
            held = kept[k]
            if (
                options[held, 1] <= options[row, 1]
                and options[held, 2] <= options[row, 2]
                and options[held, 3] <= options[row, 3]
            ):
                dominated = True
                break
        if not dominated:
            kept[number] = row
            number += 1
    kept = kept[:number]
    return code[kept] // other.shape[0], code[kept] % other.shape[0], options[kept]


@njit(cache=True)
def join(before, middle, middle_stages, after, budget, num_microbatches, incumbent):
    """Return the best (seconds, row of before, of middle, of after) on at most `budget` GPUs. Seconds is `incumbent` if
    no layout is faster. Tables are sorted by GPUs; `middle_stages`: the language model's stages."""
    best = incumbent
    found = (0, 0, 0)
    steady = num_microbatches - 1
    for m in range(middle.shape[0]):
        if middle[m, 2] + steady * middle[m, 1] >= best:
            continue
        for b in range(before.shape[0]):
            left = budget - middle[m, 0] - before[b, 0]
            if left < after[0, 0]:
                break
            slowest = max(middle[m, 1], before[b, 1])
            if middle[m, 2] + before[b, 2] + steady * slowest >= best:
                continue
            for a in range(after.shape[0]):
                if after[a, 0] > left:
                    break
                if middle[m, 3] + after[a, 3] > 0 or before[b, 3] + middle_stages[m] + after[a, 3] > 0:
                    continue
                seconds = middle[m, 2] + before[b, 2] + after[a, 2] + steady * max(slowest, after[a, 1])
                if seconds < best:
                    best = seconds
                    found = (b, m, a)
    return best, found[0], found[1], found[2]
