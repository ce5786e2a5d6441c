"""What was measured of a step: one row for every action that a rank ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dilatant.schedule.schedule import Action, ActionKind


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """`start`: seconds since the epoch, at which the rank turned to the action. It then waited `waited_seconds` for
    rows, most of them for `waited_for` (a rank, or None when nothing was awaited), and computed for `seconds`.

    samples: positions in the global batch.
    """

    rank: int
    unit: str
    action: Action
    samples: tuple[int, ...]
    start: float
    waited_seconds: float
    waited_for: int | None
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.waited_seconds + self.seconds

    def to_row(self) -> list[Any]:
        """Plain values, for JSON."""
        action = self.action
        return [
            self.rank,
            self.unit,
            [action.kind, action.stage, action.microbatch, action.samples],
            self.samples,
            self.start,
            self.waited_seconds,
            self.waited_for,
            self.seconds,
        ]

    @classmethod
    def from_row(cls, row: list[Any]) -> MeasuredAction:
        """Read what `to_row` wrote, also after a turn through JSON."""
        rank, unit, (kind, stage, microbatch, part), samples, *times = row
        action = Action(ActionKind(kind), stage, microbatch, None if part is None else tuple(part))
        return cls(rank, unit, action, tuple(samples), *times)
