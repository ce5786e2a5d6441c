"""Stragglers: how many times slower than its peers each rank is, from what its actions took.

Costs correct themselves by unit (`CostCorrection`), which says nothing of a single machine that is throttled or shared.
A rank that is far from its peers for long has all its work counted as so much dearer, so that its replica gets fewer
samples; it counts as it did before when it is hardly slower any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import Plan

SLOW, WELL = 1.25, 1.1
"""Times slower than its peers from which on a rank counts as slow, and below which no longer."""
MOST = 16.0
"""How many times slower a rank counts at most."""
FORGETTING = 0.9
"""What a step weighs after each further step: about the last ten count."""


class Slowness:
    """Of all ranks of a plan; alike on all of them, which know the same sums. Peers of a rank are those that hold a
    stage of a unit of which it holds one; without any it is never slow. Ranks that are `together` count as one: which
    of them has more to do, an odd image perhaps, is none's fault.

    factors: by rank, of the last decision.
    """

    def __init__(self, plan: Plan, together: Collection[tuple[int, ...]] = ()) -> None:
        self._ranks = len(plan.ranks)
        units: list[set[str]] = [set() for _ in range(self._ranks)]
        self._stages = [placed.stage.ranks for placed in plan.stages()]
        for placed in plan.stages():
            for rank in placed.stage.ranks:
                units[rank].add(placed.unit)
        self._peers = [
            [other for other in range(self._ranks) if other != rank and units[other] & units[rank]]
            for rank in range(self._ranks)
        ]
        self._together = [list(ranks) for ranks in dict.fromkeys(together)]
        self._sums = np.zeros((self._ranks, 2))
        self.factors = np.ones(self._ranks)
        self._decisions = 0

    @property
    def is_sure(self) -> bool:
        """Whether it is of these ranks: what was known of a run before may be of other machines, and wears off."""
        return self._decisions > 1

    @property
    def num_sums(self) -> int:
        return self._sums.size

    def own(self, rank: int, seconds: Sequence[float], predicted: NDArray[np.float64]) -> list[float]:
        """A rank's sums of a step: what its actions took, and should have taken by costs that know no slow ranks."""
        sums = np.zeros(self._sums.shape)
        if len(seconds) == len(predicted):
            sums[rank] = np.sum(seconds), predicted.sum()
        return sums.ravel().tolist()

    def add(self, summed: NDArray[np.float64]) -> None:
        """All ranks' sums of a step."""
        now = summed.reshape(self._sums.shape)
        if np.isfinite(now).all():
            self._sums = FORGETTING * self._sums + now

    def decide(self) -> NDArray[np.float64]:
        """By rank, how many times slower it is, 1 for those that are not."""
        sums = self._sums.copy()
        for ranks in self._together:
            sums[ranks] = sums[ranks].mean(axis=0)
        measured, predicted = sums.T
        known = predicted > 0
        pace = np.where(known, measured / np.where(known, predicted, 1.0), 0.0)
        factors = np.ones(self._ranks)
        for rank, peers in enumerate(self._peers):
            others = [pace[peer] for peer in peers if known[peer]]
            if not known[rank] or not others or not (typical := float(np.median(others))) > 0:
                continue
            times = float(pace[rank]) / typical
            if times > (WELL if self.factors[rank] > 1 else SLOW):
                factors[rank] = min(times, MOST)
        self.factors = factors
        self._decisions += 1
        return factors

    def by_stage(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each stage, how many times slower its slowest rank is."""
        return np.array([max(factors[rank] for rank in ranks) for ranks in self._stages])

    def to_document(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"sums": self._sums.tolist(), "factors": self.factors.tolist()}

    def from_document(self, document: Any) -> bool:
        """Go on from there, where that was of as many ranks; whether it was."""
        sums, factors = (np.asarray(document[name], dtype=np.float64) for name in ("sums", "factors"))
        if sums.shape != self._sums.shape or factors.shape != self.factors.shape:
            return False
        self._sums, self.factors = sums, factors
        return True
