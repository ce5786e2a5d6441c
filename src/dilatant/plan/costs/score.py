"""Plan score: the simulated metrics of a step under a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dilatant.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanScore:
    """A simulated step: `seconds` from the first action to synced gradients, of which `sync_seconds` are exposed.

    `idle_seconds[cause]` sums over ranks; `bubble` is the idle fraction of all rank seconds. `peak_bytes` is per rank
    in the order of `Plan.ranks`, the maximum over simulated steps. `schedule` names the best family and depth.
    `num_microbatches` is the mean number per step and language-model replica: more than requested where a token budget
    cut microbatches; 0 where no step was simulated. `least_seconds`: no schedule that was tried takes less, even if it
    overflows memory; 0 if unknown.
    """

    seconds: float
    samples_per_second: float
    bubble: float
    idle_seconds: Mapping[str, float]
    peak_bytes: tuple[float, ...]
    sync_seconds: float = 0.0
    schedule: str = ""
    num_microbatches: int = 0
    least_seconds: float = 0.0


class PlanScorer(Protocol):
    """Interface of a function that simulates a plan with this number of microbatches per pipeline. With `row_tokens`,
    microbatches with more language-model tokens are split. schedule: family to use; default: the best. most_seconds:
    for plans that surely take longer a lower bound of their seconds is enough, without bytes."""

    def __call__(
        self,
        plan: Plan,
        num_microbatches: int,
        row_tokens: int | None = None,
        schedule: str | None = None,
        most_seconds: float = math.inf,
        /,
    ) -> PlanScore: ...
