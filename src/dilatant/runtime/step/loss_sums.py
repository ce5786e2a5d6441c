"""Losses that one rank contributes to a step, and their sums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dilatant.models.core.stage import Predictions, StepData
from dilatant.runtime.state.exact_sums import rounded_loss
from dilatant.runtime.step.partial_step import LossShare


@dataclass(frozen=True, slots=True)
class ForwardOutcome:
    """The loss `name` of a forward (the part of these samples, see `StageOutput`), or the predictions of the unit
    `name`. by_sample: each sample's part of the unnormalized loss, [samples], if known."""

    name: str
    value: Tensor | Predictions
    samples: tuple[int, ...]
    by_sample: Tensor | None = None


def sum_losses(
    outcomes: Sequence[ForwardOutcome], data: StepData, salvaged: Sequence[LossShare], exact: bool
) -> tuple[dict[str, float], list[str]]:
    """Return loss name → sum of this rank's new and recovered losses, and the ids of samples with a non-finite loss.
    exact: round each loss, so that the sum does not depend on the order."""
    parts = [outcome.value.float().reshape(-1) for outcome in outcomes if isinstance(outcome.value, Tensor)]
    values = iter(torch.cat(parts).tolist() if parts else ())
    sums: dict[str, float] = {}
    nonfinite: list[str] = []
    for part, outcome in zip(parts, outcomes, strict=True):
        losses = itertools.islice(values, len(part))
        value = sum(map(rounded_loss, losses) if exact else losses)
        if not math.isfinite(value):
            nonfinite += [data.samples[sample].id for sample in outcome.samples]
        sums[outcome.name] = sums.get(outcome.name, 0.0) + value
    for share in salvaged:
        for name, value in share.values.items():
            sums[name] = sums.get(name, 0.0) + (rounded_loss(value) if exact else value)
    return sums, nonfinite


def sum_sources(
    outcomes: Sequence[ForwardOutcome], data: StepData, salvaged: Sequence[LossShare], name: str, num_sources: int
) -> list[float]:
    """Return this rank's unnormalized sum of the loss `name` by data set; empty for a single data set."""
    if num_sources < 2:
        return []
    sums = [0.0] * num_sources
    for outcome in outcomes:
        if outcome.name == name and outcome.by_sample is not None:
            for sample, loss in zip(outcome.samples, outcome.by_sample.tolist(), strict=True):
                sums[data.samples[sample].source] += loss
    for share in salvaged:
        sums = [sum(both) for both in zip(sums, share.by_source, strict=True)]
    return sums
