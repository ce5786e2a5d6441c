"""Measured steps: the step that ran, with one row for every action that a rank ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dilatant.schedule.schedule import Action, ActionKind, Assignment, Schedule, read_count


@dataclass(frozen=True, slots=True)
class MeasuredAction:
    """One action as it ran on one rank.

    The rank began the action at `start` (seconds since the epoch), waited `waited_seconds` for rows, longest for rank
    `waited_for` (None if it did not wait), and computed for `seconds`. `samples` are positions in the global batch.
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
        """Return plain values for JSON."""
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
        """Read what `to_row` wrote, also after a round trip through JSON."""
        rank, unit, (kind, stage, microbatch, part), samples, *times = row
        action = Action(ActionKind(kind), stage, microbatch, None if part is None else tuple(part))
        return cls(rank, unit, action, tuple(samples), *times)


@dataclass(frozen=True, slots=True)
class DataWait:
    """Time that a rank waited for samples before its actions. `start` is in seconds since the epoch. `slowest` lists
    the samples that took longest to decode, with their seconds, slowest first."""

    rank: int
    start: float
    seconds: float
    slowest: tuple[tuple[str, float], ...] = ()

    def to_row(self) -> list[Any]:
        """Return plain values for JSON."""
        return [self.rank, self.start, self.seconds, [list(one) for one in self.slowest]]

    @classmethod
    def from_row(cls, row: list[Any]) -> DataWait:
        """Read what `to_row` wrote, also after a round trip through JSON."""
        rank, start, seconds, slowest = row
        return cls(rank, start, seconds, tuple((str(name), float(took)) for name, took in slowest))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran, with everything needed to predict the very same step. `tokens[unit][sample]` covers the global
    batch; `waits` are the data waits of its ranks."""

    assignment: Assignment
    schedule: Schedule
    tokens: Mapping[str, tuple[int, ...]]
    actions: tuple[MeasuredAction, ...]
    waits: tuple[DataWait, ...] = ()

    def to_json(self) -> str:
        """Return a JSON document that `from_json` reads back to an equal value."""
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
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            document = json.loads(text)
            return cls(
                Assignment.from_json(json.dumps(document["assignment"])),
                Schedule.from_json(json.dumps(document["schedule"])),
                {unit: tuple(map(read_count, tokens)) for unit, tokens in document["tokens"].items()},
                tuple(MeasuredAction.from_row(row) for row in document["actions"]),
                tuple(DataWait.from_row(row) for row in document.get("waits", ())),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a measured step: {type(error).__name__}: {error}") from error
