"""What a step, or a prediction, gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dilatant.runtime.step.time_shares import StepShares


@dataclass(frozen=True, slots=True)
class StepResult:
    """The same on every rank. Reduced gradients are in the parameters of every holder.

    loss: of the global batch, the weighted sum of `losses`, which go by name. target_tokens: of the language model.
    grad_norm: of all gradients, every logical weight counted once. should_stop: whether any rank was asked to stop (see
    `execute`). shares: where the step's time went, up to the last gradient. nonfinite_samples: the ids of microbatches
    whose loss is not finite; whoever gets such a loss or norm should not apply the gradients. found: what ranks gave,
    in the order of ranks. predicted_seconds: of the step, up to synced gradients, None where costs say nothing of
    seconds. is_rough: see `PreparedStep`. drift: unit → measured over predicted seconds of its actions, by the costs
    before any correction. warning: what to tell the user of it, once in a run. source_losses: of the anchor's loss, the
    share of each data set (see `EncodedSample.source`), before weights.
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
class Predicted:
    """What the model says in the place of each target of a sample, given all before it: the likeliest token, and the
    cross entropy of the target."""

    tokens: list[int]
    losses: list[float]
