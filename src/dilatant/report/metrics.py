"""The figures of one training step, as they are logged, tracked and shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """`step` counts from 1. losses: what `loss` is the weighted sum of, by name, where that is more than one;
    source_losses: of a token of each data set, where there are several. `tokens` by unit; `tokens_per_second`
    counts the language model's tokens. skipped_updates: steps so far whose loss or gradient was not finite, which
    changed nothing. `busy` and `waited` are those of `StepShares`. predicted_seconds: of the step's actions and
    gradient sync, which `step_seconds` holds with the wait for data and the update. is_rough: that is from costs which
    nobody measured and no step has corrected. drift: unit → measured over
    predicted seconds of its actions. teraflops: that the model asked for, a second and device (see
    `training.model_flops`); mfu: as a share of the device's peak, where that is known. warning: of drift, once.
    slowest_samples: name → seconds of decoding, of rank 0's samples that took longest, where it waited for data.
    generation: of a run that goes on when ranks are lost, 0 of another; recovery: in the first step of one that follows
    another, its ranks and its costs."""

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
    predicted_seconds: float | None = None
    is_rough: bool = False
    teraflops: float = 0.0
    mfu: float | None = None
    drift: Mapping[str, float] = field(default_factory=dict)
    warning: str | None = None
    slowest_samples: Mapping[str, float] = field(default_factory=dict)
    generation: int = 0
    recovery: Mapping[str, float] = field(default_factory=dict)

    def to_record(self) -> dict[str, Any]:
        """The line of `metrics.jsonl`."""
        record = asdict(self)
        for name in ("total_steps", "warning", "is_rough"):
            record.pop(name)
        for name in ("loss", "grad_norm"):  # JSON has no word for what is not finite
            record[name] = record[name] if math.isfinite(record[name]) else None
        record["losses"] = {
            name: loss if math.isfinite(loss) else None for name, loss in record["losses"].items()
        }
        unknown = {name for name in ("predicted_seconds", "mfu") if record[name] is None}
        if not self.generation:
            unknown.add("generation")
        return {name: value for name, value in record.items() if value != {} and name not in unknown}

    def to_scalars(self) -> dict[str, float]:
        """The same figures under the flat names that trackers group by."""
        flat: dict[str, float] = {}
        for name, value in self.to_record().items():
            if name in ("step", "slowest_samples") or value is None:
                continue
            if isinstance(value, Mapping):
                flat |= {
                    f"{name}/{key}": float(number) for key, number in value.items() if number is not None
                }
            else:
                flat[f"train/{name}"] = float(value)
        return flat
