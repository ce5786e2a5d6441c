"""The Gantt chart of one step, predicted or measured: lanes of ranks, and who computed what, when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BETWEEN = "between actions"
"""Measured time in which a rank neither computed nor waited for rows."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that do the same things at the same time, drawn as one line.

    `stages` are the numbers (`PlacedStage.index`) of what they hold: one, or several where units are colocated.
    A predicted lane has all tp x cp ranks of its stages, a measured one usually a single rank.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


class GanttRow(NamedTuple):
    """One action: `kind` is F, B, I or W, or any other word for work that belongs to no stage (`stage` -1).

    `samples` are positions in the global batch; `start` is in seconds since the step began.
    """

    lane: int
    stage: int
    kind: str
    microbatch: int
    samples: tuple[int, ...]
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GanttChart:
    """`rows` sorted by lane and start; `idle[lane]` seconds by cause, empty where causes are unknown."""

    seconds: float
    lanes: tuple[Lane, ...]
    rows: tuple[GanttRow, ...]
    idle: tuple[dict[str, float], ...] = ()

    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds each lane spends computing."""
        busy = [0.0] * len(self.lanes)
        for row in self.rows:
            busy[row.lane] += row.seconds
        return tuple(busy)

    def idle_fractions(self) -> dict[str, float]:
        """What part of all device time goes idle for each cause, largest first (a lane weighs its ranks)."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        if total <= 0.0:
            return {}
        causes: dict[str, float] = {}
        for lane, idle in zip(self.lanes, self.idle):
            for cause, seconds in idle.items():
                causes[cause] = causes.get(cause, 0.0) + seconds * len(lane.ranks) / total
        return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))

    def busy_fraction(self) -> float:
        """The part of all device time spent computing."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        busy = sum(len(lane.ranks) * seconds for lane, seconds in zip(self.lanes, self.busy_seconds()))
        return busy / total if total > 0.0 else 0.0
