"""The Assignment and the Schedule: what each rank computes in one step, in which order; and the step as measured.

Sample numbers are positions in the step's global batch. Stage numbers are `PlacedStage.index` of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec

Microbatch = tuple[int, ...]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""A number of a sample, stage or microbatch; checked where it is read from a file."""


class ActionKind(StrEnum):
    """F is forward, B the whole backward, I its input-gradient half, W its weight-gradient half."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"


class Action(msgspec.Struct, frozen=True, array_like=True):
    """One computation on a rank: `kind` on `stage` for `microbatch` (its number within the stage's unit replica).

    `samples` names the part of the microbatch worked on; None means the whole microbatch. Parts exist where an encoder
    microbatch is consumed by several language-model microbatches (deferral).
    """

    kind: ActionKind
    stage: Count
    microbatch: Count
    samples: tuple[Count, ...] | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The samples of every microbatch of every unit replica.

    `microbatches[unit][replica][k]` are the samples of microbatch k, in execution order. Units may group samples
    differently; a sample without work in a unit is absent there.
    """

    microbatches: dict[str, tuple[tuple[Microbatch, ...], ...]]

    def __hash__(self) -> int:
        """Hash only the numbers of replicas: this is fast, and caches hold few assignments."""
        return hash(tuple((unit, len(replicas)) for unit, replicas in self.microbatches.items()))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered actions of every rank, `actions[rank]`. Receives and sends are derived, never stored.

    Schedule families keep the actions as arrays and create `Action` values when a rank is accessed, so building a
    schedule of a hundred thousand actions takes milliseconds if its actions are not read.
    """

    actions: Mapping[int, tuple[Action, ...]]


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
            self.assignment.microbatches, dict(self.schedule.actions), dict(self.tokens), self.actions, self.waits
        )
        return msgspec.json.encode(document).decode()

    @classmethod
    def from_json(cls, text: str) -> MeasuredStep:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        try:
            read = msgspec.json.decode(text, type=_StepFile)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a measured step: {error}") from error
        return cls(Assignment(read.assignment), Schedule(read.schedule), read.tokens, read.actions, read.waits)
