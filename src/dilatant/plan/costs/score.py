"""The score of a plan: what is known of it once a step under it has been simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dilatant.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanScore:
    """A step under a plan: `seconds` from the first action to synced gradients, of which `sync_seconds` are exposed.

    `idle_seconds[cause]` sums over ranks, `bubble` is the idle share of all rank seconds. `peak_bytes` is by rank in
    the order of `Plan.ranks`, the most in any simulated step. `schedule` names the family and depth that was found
    best. `num_microbatches` is what a language-model replica ran in a step, the mean of steps and replicas: more than
    was asked for where a token budget cut them; 0 where no step was simulated.
    """

    seconds: float
    samples_per_second: float
    bubble: float
    idle_seconds: Mapping[str, float]
    peak_bytes: tuple[float, ...]
    sync_seconds: float = 0.0
    schedule: str = ""
    num_microbatches: int = 0


class PlanScorer(Protocol):
    """Simulates a plan whose pipelines have so many microbatches in a step, or more where one would have more than
    `row_tokens` tokens of the language model; under the schedule family that suits it best, or that is named."""

    def __call__(
        self, plan: Plan, num_microbatches: int, row_tokens: int | None = None, schedule: str | None = None, /
    ) -> PlanScore: ...
