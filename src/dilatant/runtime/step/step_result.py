"""Results of a training step and of a prediction, and how a step's time was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dilatant.plan.plan import Plan
from dilatant.schedule.schedule import MeasuredAction


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Time of a step until its last gradient, as shares from 0 to 1.

    busy: unit and stage position ("language 1", all replicas together) → share of its ranks' time spent computing it;
    the rest is bubble. waited: unit → share of all ranks' time spent waiting for its rows. predicted_seconds: up to
    synced gradients; None if the costs are in tokens. is_rough: see `StepPrediction`. drift: unit → measured over
    predicted seconds of its actions, by uncorrected costs.
    """

    busy: Mapping[str, float] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    predicted_seconds: float | None = None
    is_rough: bool = False
    drift: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, the same on every rank. Reduced gradients are in the parameters of every holder.

    loss: of the global batch, the weighted sum of `losses` (by name). target_tokens: of the language model. grad_norm:
    of all gradients, every logical weight counted once. should_stop: some rank requested a stop (see `execute`).
    nonfinite_samples: ids of the samples in microbatches with a non-finite loss; gradients of a step with a non-finite
    loss or norm should not be applied. found: values from all ranks, in rank order. warning: a message about drift for
    the user, at most once per run. source_losses: each data set's unweighted part of the language model's loss (see
    `EncodedSample.source`). peak_bytes: most bytes that tensors have held so far on the fullest GPU; None on CPUs.
    """

    loss: float
    losses: Mapping[str, float]
    target_tokens: int
    grad_norm: float
    should_stop: bool
    times: StepTimes
    nonfinite_samples: tuple[str, ...] = ()
    found: tuple[Any, ...] = ()
    warning: str | None = None
    source_losses: tuple[float, ...] = ()
    peak_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class SamplePredictions:
    """Predictions for each target of a sample, given everything before it: the most likely token, and the target's
    cross entropy."""

    tokens: list[int]
    losses: list[float]


class ShareCounter:
    """Computes time shares from measurements: ranks sum their `own` lists, and `shares` reads the total."""

    def __init__(self, plan: Plan) -> None:
        stages = plan.stages()
        self._label = {placed.index: f"{placed.unit} {placed.position}" for placed in stages}
        self._ranks: dict[str, int] = dict.fromkeys(self._label.values(), 0)
        self._unit_of_rank: dict[int, str] = {}
        for placed in stages:
            self._ranks[self._label[placed.index]] += len(placed.stage.ranks)
            for rank in placed.stage.ranks:
                self._unit_of_rank.setdefault(rank, placed.unit)
        self._units = [unit.name for unit in plan.units]
        self._busy_ranks = frozenset(plan.ranks)

    def own(self, rank: int, actions: Sequence[MeasuredAction], seconds: float) -> list[float]:
        """Return a rank's addends: seconds computed by stage, seconds waited by unit, and the step's `seconds`; zeros
        for a rank without a stage."""
        busy = dict.fromkeys(self._ranks, 0.0)
        waited = dict.fromkeys(self._units, 0.0)
        for one in actions:
            busy[self._label[one.action.stage]] += one.seconds
            if one.waited_for is not None:
                waited[self._unit_of_rank[one.waited_for]] += one.waited_seconds
        return [*busy.values(), *waited.values(), seconds if rank in self._busy_ranks else 0.0]

    def shares(self, summed: Sequence[float]) -> StepTimes:
        """Return the shares from the sum of all ranks' `own`; the step's length is the mean over ranks with a stage."""
        total = summed[-1] or 1.0
        mean = total / len(self._busy_ranks)
        stages = len(self._ranks)
        return StepTimes(
            {label: value / (mean * ranks) for (label, ranks), value in zip(self._ranks.items(), summed)},
            {unit: value / total for unit, value in zip(self._units, summed[stages:])},
        )
