"""Non-finite losses and gradients: detection and error text."""

from __future__ import annotations

import math

from dilatant.data.workers.loader import GlobalBatch
from dilatant.runtime.step.step_result import StepResult


def is_finite(result: StepResult) -> bool:
    """Return True if a step's loss and gradient norm are finite."""
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)


def explain_nonfinite(step: int, result: StepResult, batch: GlobalBatch) -> str:
    """Return the error text for a non-finite `step`: its effect, its samples and the remedy."""
    if result.nonfinite_samples:
        what = f"the loss became {result.loss} in microbatches with the samples"
        names = result.nonfinite_samples
    else:
        what = f"the gradient's norm is {result.grad_norm} for a step with the samples"
        names = tuple(sample.id for sample in batch.samples)
    listed = ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"step {step}: {what} {listed}; nothing was updated. Lower the learning rate, look at these samples, or set "
        "train.on_nonfinite: skip"
    )
