"""Best checkpoint: track the best evaluation so far, to keep its checkpoint and to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dilatant.config import UserError
from dilatant.config.train import EvaluationConfig


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """Best evaluation so far, the same on all ranks and stored with the run's position. step: None before any
    evaluation. value: its figure. since: evaluations after it."""

    step: int | None = None
    value: float = math.nan
    since: int = 0

    def after(self, step: int, value: float, how: EvaluationConfig) -> BestEvaluation:
        """Return the record after the evaluation at `step`. A figure that is not finite is never better."""
        gain = (self.value - value) if how.smaller_is_better else (value - self.value)
        if math.isfinite(value) and (self.step is None or gain > how.min_delta):
            return BestEvaluation(step, value)
        return replace(self, since=self.since + 1)

    def ends(self, how: EvaluationConfig) -> bool:
        """Return True if training stops early."""
        return how.patience is not None and self.since >= how.patience

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "value": self.value if self.step is not None else None,
            "since": self.since,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any] | None) -> BestEvaluation:
        """Read what `to_json` returned. Raises UserError for anything else."""
        if tree is None:
            return cls()
        try:
            step, since = tree["step"], int(tree["since"])
            return cls(since=since) if step is None else cls(int(step), float(tree["value"]), since)
        except (KeyError, TypeError, ValueError):
            raise UserError(
                "the checkpoint's value 'best' is no evaluation; resume from another one"
            ) from None
