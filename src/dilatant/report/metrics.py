"""Metrics of one training step, as logged, tracked and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of one step; `step` counts from 1.
    losses: the terms of the weighted sum `loss`, by name, if there are several; source_losses: loss per token of each
    data set, if there are several. rewards: of pairs of answers, by name (see `pair_loss.MEASURES`). `tokens` is by
    unit; `tokens_per_second` counts the language model's tokens.
    skipped_updates: steps so far whose loss or gradient was not finite and which changed nothing. `busy` and `waited`:
    as in `StepTimes`. predicted_seconds: of the step's actions and gradient sync; `step_seconds` also includes the
    wait for data and the update. is_rough: the prediction uses costs that are neither measured nor corrected by a step.
    drift: unit → measured over predicted seconds of its actions. teraflops: per second and device, as the model
    requires (see `training.model_flops`); mfu: fraction of the device's peak, if known. peak_bytes: most bytes that
    tensors have held so far on the fullest GPU, if there are GPUs. warning: reported once, about
    drift. slowest_samples: name → seconds of decoding, for rank 0's slowest samples if it waited for data. generation:
    of a resilient run, else 0; recovery: in the first step of a later generation, its ranks and the recovery costs.
    figures: those that callbacks logged, by name."""

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    learning_rates: Mapping[str, float]
    step_seconds: float
    data_wait_seconds: float
    samples: int
    skipped_samples: int
    skipped_updates: int
    target_tokens: int
    tokens: Mapping[str, int]
    tokens_per_second: float
    epoch: float
    busy: Mapping[str, float] = field(default_factory=dict)
    waited: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    source_losses: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    predicted_seconds: float | None = None
    is_rough: bool = False
    teraflops: float = 0.0
    mfu: float | None = None
    peak_bytes: float | None = None
    drift: Mapping[str, float] = field(default_factory=dict)
    warning: str | None = None
    slowest_samples: Mapping[str, float] = field(default_factory=dict)
    generation: int = 0
    recovery: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """Return the record for `metrics.jsonl`."""
        record = asdict(self)
        for name in ("total_steps", "warning", "is_rough"):
            record.pop(name)
        for name in ("loss", "grad_norm"):  # JSON cannot represent non-finite numbers
            record[name] = record[name] if math.isfinite(record[name]) else None
        for name in ("losses", "rewards", "figures"):
            record[name] = finite_or_none(record[name])
        unknown = {name for name in ("predicted_seconds", "mfu", "peak_bytes") if record[name] is None}
        if not self.generation:
            unknown.add("generation")
        return {name: value for name, value in record.items() if value != {} and name not in unknown}

    def to_scalars(self) -> dict[str, float]:
        """Return the same metrics under flat names, grouped as trackers expect."""
        flat: dict[str, float] = {}
        for name, value in self.to_record().items():
            if name in ("step", "slowest_samples") or value is None:
                continue
            if isinstance(value, Mapping):
                flat |= {f"{name}/{key}": float(number) for key, number in value.items() if number is not None}
            else:
                flat[f"train/{name}"] = float(value)
        return flat


def finite_or_none(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Return numbers by name as JSON can represent them: None for those that are not finite."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
