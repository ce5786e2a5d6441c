"""The Assignment and the Schedule: what each rank computes in one step, in which order.

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
