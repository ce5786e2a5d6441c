"""Gantt chart of one step, predicted or measured: lanes of ranks with the actions on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BETWEEN = "between actions"
"""Cause of measured time in which a rank neither computed nor waited for rows."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that do the same things at the same time, drawn as one line.

    `stages` are the numbers (`PlacedStage.index`) of the stages they hold: one, or several if units are colocated. A
    predicted lane has all tp x cp ranks of its stages, a measured lane usually a single rank.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


class GanttRow(NamedTuple):
    """One action: `kind` is F, B, I or W, or another word for work outside any stage (`stage` -1).

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
    """A chart: `rows` sorted by lane and start; `idle[lane]` has seconds by cause, empty if causes are unknown."""

    seconds: float
    lanes: tuple[Lane, ...]
    rows: tuple[GanttRow, ...]
    idle: tuple[dict[str, float], ...] = ()

    def busy_seconds(self) -> tuple[float, ...]:
        """Return the seconds that each lane computes."""
        busy = [0.0] * len(self.lanes)
        for row in self.rows:
            busy[row.lane] += row.seconds
        return tuple(busy)

    def idle_fractions(self) -> dict[str, float]:
        """Return the fraction of all device time that is idle by cause, largest first (lanes count once per rank)."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        if total <= 0.0:
            return {}
        causes: dict[str, float] = {}
        for lane, idle in zip(self.lanes, self.idle):
            for cause, seconds in idle.items():
                causes[cause] = causes.get(cause, 0.0) + seconds * len(lane.ranks) / total
        return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))

    def busy_fraction(self) -> float:
        """Return the fraction of all device time spent computing."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        busy = sum(len(lane.ranks) * seconds for lane, seconds in zip(self.lanes, self.busy_seconds()))
        return busy / total if total > 0.0 else 0.0
