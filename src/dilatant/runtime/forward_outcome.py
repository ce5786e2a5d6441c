"""Losses and predictions that a forward contributes to the step's result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilatant.models.core.stage import Predictions


@dataclass(frozen=True, slots=True)
class ForwardOutcome:
    """The loss `name` of a forward (the part of these samples, see `StageOutput`), or the predictions of the unit
    `name`. by_sample: each sample's part of the unnormalized loss, [samples], if known."""

    name: str
    value: Tensor | Predictions
    samples: tuple[int, ...]
    by_sample: Tensor | None = None
