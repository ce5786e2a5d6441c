"""Results of a training step and of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilatant.runtime.step.time_shares import StepShares


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, the same on every rank. Reduced gradients are in the parameters of every holder.

    loss: of the global batch, the weighted sum of `losses` (by name). target_tokens: of the language model. grad_norm:
    of all gradients, every logical weight counted once. should_stop: some rank requested a stop (see `execute`).
    shares: shares of time until the last gradient. nonfinite_samples: ids of the samples in microbatches with a
    non-finite loss; gradients of a step with a non-finite loss or norm should not be applied. found: values from all
    ranks, in rank order. predicted_seconds: up to synced gradients; None if the costs are in tokens. is_rough: see
    `PreparedStep`. drift: unit → measured over predicted seconds of its actions, by uncorrected costs. warning: a
    message about drift for the user, at most once per run. source_losses: each data set's unweighted part of the
    language model's loss (see `EncodedSample.source`).
    """

    loss: float
    losses: Mapping[str, float]
    target_tokens: int
    grad_norm: float
    should_stop: bool
    shares: StepShares
    nonfinite_samples: tuple[str, ...] = ()
    found: tuple[Any, ...] = ()
    predicted_seconds: float | None = None
    is_rough: bool = False
    drift: Mapping[str, float] = field(default_factory=dict)
    warning: str | None = None
    source_losses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplePredictions:
    """Predictions for each target of a sample, given everything before it: the most likely token, and the target's
    cross entropy."""

    tokens: list[int]
    losses: list[float]
