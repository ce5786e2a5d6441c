"""What was measured of a step: one row for every action that a rank ran, and what the step was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule, whole


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


@dataclass(frozen=True, slots=True)
class DataWait:
    """How long a rank waited for samples before its actions. start: as of `MeasuredAction`. slowest: of its samples
    those that took longest to decode, with their seconds, the slowest first."""

    rank: int
    start: float
    seconds: float
    slowest: tuple[tuple[str, float], ...] = ()

    def to_row(self) -> list[Any]:
        """Plain values, for JSON."""
        return [self.rank, self.start, self.seconds, [list(one) for one in self.slowest]]

    @classmethod
    def from_row(cls, row: list[Any]) -> DataWait:
        """Read what `to_row` wrote, also after a turn through JSON."""
        rank, start, seconds, slowest = row
        return cls(rank, start, seconds, tuple((str(name), float(took)) for name, took in slowest))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran: enough to predict the very same step. `tokens[unit][sample]` are those of the global batch.
    waits: of its ranks."""

    assignment: Assignment
    schedule: Schedule
    tokens: Mapping[str, tuple[int, ...]]
    actions: tuple[MeasuredAction, ...]
    waits: tuple[DataWait, ...] = ()

    def to_json(self) -> str:
        """A JSON document that `from_json` reads back to an equal value."""
        document = {
            "assignment": json.loads(self.assignment.to_json()),
            "schedule": json.loads(self.schedule.to_json()),
            "tokens": self.tokens,
            "actions": [action.to_row() for action in self.actions],
            "waits": [wait.to_row() for wait in self.waits],
        }
        return json.dumps(document)

    @classmethod
    def from_json(cls, text: str) -> MeasuredStep:
        """Read what `to_json` wrote. Raises ValueError when it is something else."""
        try:
            document = json.loads(text)
            return cls(
                Assignment.from_json(json.dumps(document["assignment"])),
                Schedule.from_json(json.dumps(document["schedule"])),
                {unit: tuple(map(whole, tokens)) for unit, tokens in document["tokens"].items()},
                tuple(MeasuredAction.from_row(row) for row in document["actions"]),
                tuple(DataWait.from_row(row) for row in document.get("waits", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a measured step: {type(error).__name__}: {error}") from error
