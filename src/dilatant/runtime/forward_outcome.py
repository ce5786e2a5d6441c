"""What a forward gives besides rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilatant.models.core.stage import Predictions


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a forward made for the step's result: of the loss of this name these samples' share (as of `StageOutput`),
    or what a unit of this name predicts for them. by_sample: what each adds to the loss before it is divided,
    [samples], where that is known."""

    name: str
    value: Tensor | Predictions
    samples: tuple[int, ...]
    by_sample: Tensor | None = None
