"""The Timeline: a schedule with the seconds at which every action starts and ends.

The simulator predicts a timeline; a runtime that measures its actions writes the same value, so that a prediction can
be compared with the measurement of the very same actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import Plan
from dilatant.schedule.schedule import Action, Assignment, Schedule

WARM_UP, DRAIN, COMMUNICATION, IMBALANCE = "warm-up", "drain", "communication", "imbalance"
WAITING_FOR_DATA = "waiting for data"


def waiting_for(unit: str) -> str:
    """Return the name of the idle cause "this rank waited for that unit"."""
    return f"waiting for {unit}"


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One step on every rank.

    `start` and `end` are seconds since the step began, rank by rank in the order of `schedule.actions[rank]`:
    `[rows]` float64, with the rows of `ranks[i]` at `offsets[i]:offsets[i + 1]`. `busy` is `[ranks]` seconds and
    `idle` `[ranks, causes]` seconds; busy plus idle is `seconds` on every rank. `peak_bytes` is `[ranks]`, or None
    when no memory was modelled. `arrows` is `[messages, 2]`: the rows that produce and consume each message.
    """

    plan: Plan
    assignment: Assignment
    schedule: Schedule
    seconds: float
    ranks: tuple[int, ...]
    offsets: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    busy: NDArray[np.float64]
    causes: tuple[str, ...]
    idle: NDArray[np.float64]
    peak_bytes: NDArray[np.float64] | None
    arrows: NDArray[np.int64]

    def of_rank(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return every action of `rank` with its start and end in seconds."""
        index = self.ranks.index(rank)
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return list(zip(self.schedule.actions[rank], self.start[rows].tolist(), self.end[rows].tolist(), strict=True))

    @property
    def idle_by_cause(self) -> dict[str, float]:
        """Idle seconds summed over ranks, by cause."""
        return dict(zip(self.causes, self.idle.sum(axis=0).tolist(), strict=True))

    @property
    def bubble(self) -> float:
        """The idle fraction of all rank seconds, between 0 and 1."""
        total = self.seconds * len(self.ranks)
        return float(self.idle.sum() / total) if total else 0.0
