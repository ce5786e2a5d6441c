"""The Assignment and the Schedule: what each rank computes in one step, in which order.

Sample numbers are positions in the step's global batch. Stage numbers are `PlacedStage.index` of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Microbatch = tuple[int, ...]


class ActionKind(StrEnum):
    """F is forward, B the whole backward, I its input-gradient half, W its weight-gradient half."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741
    W = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation on a rank: `kind` on `stage` for `microbatch` (its number within the stage's unit replica).

    `samples` names the part of the microbatch worked on; None means the whole microbatch. Parts exist where an encoder
    microbatch is consumed by several language-model microbatches (deferral).
    """

    kind: ActionKind
    stage: int
    microbatch: int
    samples: tuple[int, ...] | None = None


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

    def to_json(self) -> str:
        return json.dumps(self.microbatches)

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        return cls(
            {
                unit: tuple(tuple(tuple(map(read_count, batch)) for batch in replica) for replica in replicas)
                for unit, replicas in json.loads(text).items()
            }
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ordered actions of every rank, `actions[rank]`. Receives and sends are derived, never stored.

    Schedule families keep the actions as arrays and create `Action` values when a rank is accessed, so building a
    schedule of a hundred thousand actions takes milliseconds if its actions are not read.
    """

    actions: Mapping[int, tuple[Action, ...]]

    def to_json(self) -> str:
        return json.dumps(
            {
                rank: [[action.kind, action.stage, action.microbatch, action.samples] for action in actions]
                for rank, actions in self.actions.items()
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        return cls(
            {
                int(rank): tuple(
                    Action(
                        ActionKind(kind),
                        read_count(stage),
                        read_count(microbatch),
                        None if samples is None else tuple(map(read_count, samples)),
                    )
                    for kind, stage, microbatch, samples in actions
                )
                for rank, actions in json.loads(text).items()
            }
        )


def read_count(value: Any) -> int:
    """Return a number (sample, stage, microbatch, count) read from a file. Raises ValueError unless 0 <= int < 2^31."""
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} where a whole number from 0 on was expected")
    return value
