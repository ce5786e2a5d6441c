"""Stragglers: estimate from measured action times how many times slower than its peers each rank is.

`CostCorrection` corrects costs by unit and cannot see a single machine that is throttled or shared. A rank that is
persistently slower than its peers has its costs scaled up, so that its replica gets fewer samples, until it has almost
caught up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import Plan

SLOW, WELL = 1.25, 1.1
"""A rank is slow above the first ratio to its peers' median pace, and no longer slow below the second."""
MOST = 16.0
"""Upper limit of a rank's slowness factor."""
FORGETTING = 0.9
"""Decay of the sums per step: an average over about ten steps."""


class Slowness:
    """Slowness factors of the ranks of a plan, computed identically on all ranks from the same sums. The peers of a
    rank hold stages of the same unit; a rank without peers is never slow. The ranks of each group in `together` are
    averaged, since their work differs by chance (for example, by an odd image).

    factors: by rank, from the last `decide`.
    """

    def __init__(self, plan: Plan, together: Collection[tuple[int, ...]] = ()) -> None:
        self._ranks = max(plan.ranks, default=-1) + 1  # ranks above have no stage, and are never slow
        units: list[set[str]] = [set() for _ in range(self._ranks)]
        self._stages = [placed.stage.ranks for placed in plan.stages()]
        for placed in plan.stages():
            for rank in placed.stage.ranks:
                units[rank].add(placed.unit)
        alike = {  # few, however many ranks there are
            own: np.array([rank for rank in range(self._ranks) if units[rank] & own], dtype=np.int64)
            for own in set(map(frozenset, units))
        }
        self._peers = [alike[frozenset(own)] for own in units]  # with the rank itself
        self._together = [list(ranks) for ranks in dict.fromkeys(together)]
        self._sums = np.zeros((self._ranks, 2))
        self.factors = np.ones(self._ranks)
        self._decisions = 0

    @property
    def is_sure(self) -> bool:
        """True if these ranks measured the factors; restored factors may be of other machines, and decay."""
        return self._decisions > 1

    def of(self, rank: int) -> float:
        """Return how many times slower than its peers a rank is, as far as these ranks have measured it."""
        return float(self.factors[rank]) if self.is_sure and rank < self._ranks else 1.0

    @property
    def num_sums(self) -> int:
        return self._sums.size

    def own(self, rank: int, seconds: Sequence[float], predicted: NDArray[np.float64]) -> list[float]:
        """Return a rank's sums for a step: its seconds, measured and predicted by costs without slowness factors."""
        sums = np.zeros(self._sums.shape)
        if len(seconds) == len(predicted) > 0:
            sums[rank] = np.sum(seconds), predicted.sum()
        return sums.ravel().tolist()

    def add(self, summed: NDArray[np.float64]) -> None:
        """Add the sums of a step, totalled over all ranks."""
        now = summed.reshape(self._sums.shape)
        if np.isfinite(now).all():
            self._sums = FORGETTING * self._sums + now

    def decide(self) -> NDArray[np.float64]:
        """Return for each rank how many times slower it is than its peers; 1 for ranks that are not slow."""
        sums = self._sums.copy()
        for ranks in self._together:
            sums[ranks] = sums[ranks].mean(axis=0)
        measured, predicted = sums.T
        known = predicted > 0
        pace = np.where(known, measured / np.where(known, predicted, 1.0), 0.0)
        factors = np.ones(self._ranks)
        for rank, peers in enumerate(self._peers):
            others = pace[peers[known[peers] & (peers != rank)]]
            if not known[rank] or not len(others) or not (typical := float(np.median(others))) > 0:
                continue
            times = float(pace[rank]) / typical
            if times > (WELL if self.factors[rank] > 1 else SLOW):
                factors[rank] = min(times, MOST)
        self.factors = factors
        self._decisions += 1
        return factors

    def by_stage(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return for each stage the factor of its slowest rank."""
        return np.array([max(factors[rank] for rank in ranks) for ranks in self._stages])

    def to_document(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        return {"sums": self._sums.tolist(), "factors": self.factors.tolist()}

    def from_document(self, document: Mapping[str, Any]) -> bool:
        """Restore a state; returns False, and changes nothing, if it is for another number of ranks or empty."""
        sums, factors = (np.asarray(document.get(name, ()), dtype=np.float64) for name in ("sums", "factors"))
        if sums.shape != self._sums.shape or factors.shape != self.factors.shape:
            return False
        self._sums, self.factors = sums, factors
        return True
