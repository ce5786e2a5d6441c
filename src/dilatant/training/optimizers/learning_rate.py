"""Learning-rate schedule: warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from dilatant.config import RateSchedule


def rate_factor(schedule: RateSchedule, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate that step `step` (0-based) of `total_steps` uses, in [0, 1].

    Warm-up rises linearly and reaches 1 at step `warmup_steps`; `final_ratio` would be reached one step after the last,
    so no step is spent at a rate of zero.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    shape = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * shape
