"""Measured steps: the step that ran, with one row for every action that a rank ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dilatant.schedule.schedule import Action, Assignment, Count, Schedule


class MeasuredAction(msgspec.Struct, frozen=True, array_like=True):
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


class DataWait(msgspec.Struct, frozen=True, array_like=True):
    """Time that a rank waited for samples before its actions. `start` is in seconds since the epoch. `slowest` lists
    the samples that took longest to decode, with their seconds, slowest first."""

    rank: int
    start: float
    seconds: float
    slowest: tuple[tuple[str, float], ...] = ()


class _StepFile(msgspec.Struct):
    """The JSON document of a `MeasuredStep`; actions and waits are rows."""

    assignment: dict[str, tuple[tuple[tuple[Count, ...], ...], ...]]
    schedule: dict[int, tuple[Action, ...]]
    tokens: dict[str, tuple[Count, ...]]
    actions: tuple[MeasuredAction, ...]
    waits: tuple[DataWait, ...] = ()


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
        document = _StepFile(
            self.assignment.microbatches,
            dict(self.schedule.actions),
            dict(self.tokens),
            self.actions,
            self.waits,
        )
        return msgspec.json.encode(document).decode()

    @classmethod
    def from_json(cls, text: str) -> MeasuredStep:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            read = msgspec.json.decode(text, type=_StepFile)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a measured step: {error}") from error
        return cls(
            Assignment(read.assignment), Schedule(read.schedule), read.tokens, read.actions, read.waits
        )
