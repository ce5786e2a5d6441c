"""The token budget is that of the language model's microbatches, whichever unit is first and whoever defers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dilatant.config.errors import UserError
from dilatant.schedule.assignment.assign import Policy, assign_microbatches
from dilatant.schedule.assignment.pipeline_shape import ByUnit, MicrobatchProblem, PipelineShape, default_shape

SHAPES = (
    default_shape(2),
    default_shape(3),
    PipelineShape((2, 2, 2), ((1,), (), ()), (2.0,) * 3, (0.0,) * 3),  # what is fed is in the middle
)
ANCHORS = (1, 2, 1)


def largest(batches: tuple[tuple[int, ...], ...], weight: np.ndarray) -> float:
    return max((sum(weight[sample] for sample in batch) for batch in batches), default=0.0)


def unlike(problem: MicrobatchProblem) -> ByUnit:
    """Microbatches that every unit draws for itself."""
    draw = np.random.default_rng(problem.seed)
    slots = draw.integers(0, problem.num_microbatches, problem.seconds.T.shape)
    return tuple(
        tuple(tuple(np.flatnonzero(own == slot).tolist()) for slot in range(problem.num_microbatches)) for own in slots
    )


@pytest.mark.parametrize("policy", ["random", "searched", unlike])
def test_token_budget_limits_only_language_microbatches(policy: Policy) -> None:
    met: Counter[str] = Counter()
    for seed in range(60 if policy != "searched" else 12):
        rng = np.random.default_rng(seed)
        shape, anchor = SHAPES[seed % 3], ANCHORS[seed % 3]
        count, samples = int(rng.integers(2, 5)), int(rng.integers(6, 14))
        seconds = rng.lognormal(0, 1, (samples, shape.num_units))
        weight = rng.integers(1, 100, samples).astype(np.float64)
        settings = {"shape": shape, "evaluations": 100}
        free = assign_microbatches(seconds, count, policy, seed, **settings)  # type: ignore[arg-type]
        by_unit = [largest(free[unit], weight) for unit in range(shape.num_units)]
        # Between what the language model's microbatches take and what those of another unit do, where these differ.
        other = max(by_unit, key=lambda most: abs(most - by_unit[anchor]))
        capacity = (by_unit[anchor] + other) / 2 if other != by_unit[anchor] else by_unit[anchor] - 1
        try:
            held = assign_microbatches(
                seconds, count, policy, seed, weight=weight, capacity=capacity, **settings  # type: ignore[arg-type]
            )  # fmt: skip
        except UserError:
            continue  # so many microbatches cannot hold the samples
        assert largest(held[anchor], weight) <= capacity
        fits = by_unit[anchor] <= capacity
        met["kept" if fits else "cut"] += 1
        if fits and policy != "searched":  # which knows of the budget itself
            assert held == free
    assert met["cut"] > 0
    assert met["kept"] > 0 or policy is not unlike
