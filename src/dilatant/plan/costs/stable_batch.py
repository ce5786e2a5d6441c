"""Stable batch size: smallest batch that reliably prefers the same device allocation as the whole data."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.config.degrees import ONE
from dilatant.cost.model import CostModel
from dilatant.plan.costs.stage_costs import layer_table
from dilatant.plan.costs.workload import Workload
from dilatant.plan.model_spec import ModelSpec

Allocation = tuple[int, ...]

TRIALS = 400
"""Batches that are drawn to measure agreement where the bound on disagreement is too loose."""


@dataclass(frozen=True, slots=True)
class StableBatch:
    """The smallest number of samples with which random batches prefer the same devices per unit as the whole data set.

    `batch` is that number, rounded up; None if not even `largest` samples suffice. `allocation`: the devices of each
    unit that the whole data set prefers. `confidence`: the probability that a batch of `batch` samples (of `largest`,
    if `batch` is None) prefers the same.
    """

    batch: int | None
    allocation: Allocation
    confidence: float
    largest: int

    def warning(self, global_batch: int) -> str | None:
        """Return a warning for a user who trains with `global_batch` samples a step; None if there is no problem."""
        if self.batch is None:
            return (
                f"the data set is too small for a stable ratio of work: batches of {self.largest} samples ask for "
                f"{' + '.join(map(str, self.allocation))} devices in {self.confidence:.0%} of the cases only; index "
                "more data, or choose the plan by hand"
            )
        if global_batch < self.batch:
            return (
                f"the global batch of {global_batch} is below the {self.batch} samples from which on batches ask for "
                f"the same devices per unit; single steps will be unbalanced, a larger batch is steadier"
            )
        return None


def sample_work(model: ModelSpec, costs: CostModel, workload: Workload) -> NDArray[np.float64]:
    """Return [samples, units] device seconds of forward plus backward under the frozen rule, units in model order.

    The seconds are those at the smallest degrees with costs for the unit, times its devices, as `minimum_stable_batch`
    expects. Raises UserError for layer types without costs.
    """
    columns = []
    for unit in model.units:
        degrees = set.intersection(*(set(costs.layers.get(layer.kind, {})) for layer in unit.layers))
        least = min(degrees, key=lambda one: (one.ranks, one), default=ONE)
        table = layer_table(unit, model.upstream_trainable(unit.name), costs, least)
        square, linear, constant = (table.seconds[:, 0] + table.seconds[:, 1]).sum(axis=0) * least.ranks
        squares, tokens = workload.of_samples(unit.name)
        columns.append(np.where(tokens > 0, square * squares + linear * tokens + constant, 0.0))
    return np.stack(columns, axis=1)


def feasible_allocations(sizes: Sequence[Sequence[int]], budget: int) -> tuple[Allocation, ...]:
    """Return all allocations of exactly `budget` devices; unit u has one of `sizes[u]` (ranks of a stage * stages)."""
    *first, last = [sorted(set(own)) for own in sizes]
    return tuple((*head, budget - sum(head)) for head in itertools.product(*first) if budget - sum(head) in last)


def minimum_stable_batch(
    work: ArrayLike,
    allocations: Sequence[Allocation],
    error: float = 0.05,
    tolerance: float = 0.0,
    largest: int | None = None,
) -> StableBatch:
    """Return Entrain's b_min: the smallest batch size at which random batches prefer the same allocation.

    `work` is [samples, units] seconds on one device, not all zero. A batch prefers the allocation whose slowest unit is
    fastest. `allocations` must contain only those that some plan can have: tensor degree 2 excludes 9:7 devices.

    A batch of n disagrees when the mean of some linear function of its samples changes sign; by the central limit
    theorem this has probability Phi(-sqrt(n) * distance / deviation) (the delta method). The result is the smallest n,
    up to `largest` (default: the number of samples), for which these probabilities add up to at most `error` over all
    rival allocations.

    Allocations within `tolerance` (relative, slowest unit) of the best are treated as equal: distinguishing nearly
    equal allocations would take endless samples without benefit.

    Source: Entrain (the thesis, 4.4.2 and Appendix C.1-C.2); here with means of work rather than of ratios, and the
    distance by the delta method rather than by trials.
    """
    samples, table = np.asarray(work, dtype=np.float64), np.array(allocations, dtype=np.float64)
    largest = largest or len(samples)
    mean = samples.mean(axis=0)
    chosen = int(_choose(mean[None], table)[0])
    slowest = (mean / table).max(axis=1)
    same = slowest <= slowest[chosen] * (1.0 + tolerance)
    same[chosen] = True
    batch, reached = _delta(samples, table, chosen, same, error, largest)
    return StableBatch(batch, tuple(allocations[chosen]), reached, largest)


def _choose(means: NDArray[np.float64], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each row of `means` [batches, units] the index of the preferred allocation; the first of equals."""
    return (means[:, None, :] / table[None]).max(axis=2).argmin(axis=1)


def _delta(
    samples: NDArray[np.float64],
    table: NDArray[np.float64],
    chosen: int,
    same: NDArray[np.bool_],
    error: float,
    largest: int,
) -> tuple[int | None, float]:
    """Return (smallest sufficient samples or None, probability of agreement there; measured by sampling if None)."""
    mean, covariance = samples.mean(axis=0), np.atleast_2d(np.cov(samples, rowvar=False, bias=True))
    ratios = [
        [[_distance(weights, mean, covariance) for weights in row] for row in _borders(table, chosen, k)]
        for k in range(len(table))
        if not same[k]
    ]

    def disagreement(n: int) -> float:
        """A bound on the probability that a batch of n asks for a rival."""
        root = math.sqrt(n)
        return sum(min(sum(_tail(root * ratio) for ratio in row) for row in rows) for rows in ratios)

    if disagreement(largest) > error:
        generator = np.random.default_rng(0)
        draws = (samples[generator.integers(len(samples), size=largest)] for _ in range(TRIALS))
        picks = _choose(np.stack([drawn.mean(axis=0) for drawn in draws]), table)
        agreeing = float(same[picks].mean())  # with many rivals the sum above is a loose bound
        return largest if agreeing >= 1.0 - error else None, agreeing
    least = 1 + bisect_left(range(1, largest), True, key=lambda n: disagreement(n) <= error)
    return least, 1.0 - disagreement(least)


def _borders(table: NDArray[np.float64], chosen: int, rival: int) -> list[list[NDArray[np.float64]]]:
    """Return linear functions of a batch's mean work that are positive while the chosen allocation wins.

    At least one function of each row must change sign before the rival wins, so each row bounds that probability by the
    sum over its functions, and the best row is used. The rival's slowest unit must be faster than the chosen one's, so
    for any unit j some unit k has w_j / rival_j < w_k / chosen_k.
    """
    unit = np.eye(table.shape[1])
    return [
        [unit[j] / table[rival, j] - unit[k] / table[chosen, k] for k in range(table.shape[1])]
        for j in range(table.shape[1])
    ]


def _distance(weights: NDArray[np.float64], mean: NDArray[np.float64], covariance: NDArray[np.float64]) -> float:
    """Return mean over standard deviation of weights @ work; infinite if weights of one sign fix the sign."""
    value = float(weights @ mean)
    variance = float(weights @ covariance @ weights)
    if (weights >= 0.0).all() or (weights <= 0.0).all() or variance <= (1e-12 * value) ** 2:
        return math.copysign(math.inf, value) if value else 0.0
    return value / math.sqrt(variance)


def _tail(z: float) -> float:
    """Return the probability that a standard normal variable exceeds z."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))
