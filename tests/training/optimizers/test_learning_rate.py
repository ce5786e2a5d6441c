"""The learning rate rises, falls and ends where the config says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dilatant.config import RateSchedule, UserError
from dilatant.training.optimizers.optimizer import rate_factor


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_rises_to_the_peak_and_no_step_is_wasted(kind: str) -> None:
    schedule = RateSchedule(kind=kind, warmup_steps=4)
    factors = [rate_factor(schedule, step, 20) for step in range(20)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(factor > 0 for factor in factors)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_fall_ends_at_the_final_ratio(kind: str) -> None:
    schedule = RateSchedule(kind=kind, warmup_steps=0, final_ratio=0.1)
    factors = [rate_factor(schedule, step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1.0)
    assert factors[50] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)
    assert factors == sorted(factors, reverse=True)


def test_the_fall_takes_the_steps_after_the_warm_up() -> None:
    schedule = RateSchedule(kind="linear", warmup_steps=20, final_ratio=0.2)
    factors = [rate_factor(schedule, step, 100) for step in range(101)]
    # A straight line from 1 at step 20 to 0.2 at step 100: a hundredth a step.
    assert factors[20:] == pytest.approx([1 - 0.01 * step for step in range(81)])
    assert rate_factor(schedule, 500, 100) == pytest.approx(0.2)
    cosine = RateSchedule(kind="cosine", warmup_steps=20, final_ratio=0.2)
    assert rate_factor(cosine, 60, 100) == pytest.approx(0.6)  # half-way in steps is half-way in rate
    assert rate_factor(cosine, 40, 100) == pytest.approx(0.2 + 0.8 * (0.5 + 2**0.5 / 4))


def test_warm_up_longer_than_the_run_is_harmless() -> None:
    schedule = RateSchedule(kind="cosine", warmup_steps=50)
    assert rate_factor(schedule, 9, 10) == pytest.approx(10 / 51)


@pytest.mark.parametrize(("ratio", "steps", "warm_up"), [(0.1, 20, 2), (0.03, 20, 1), (0.0, 20, 0), (0.5, 7, 4)])
def test_a_warm_up_by_share_is_one_by_steps(ratio: float, steps: int, warm_up: int) -> None:
    by_share, by_steps = RateSchedule(warmup_ratio=ratio), RateSchedule(warmup_steps=warm_up)
    factors = [rate_factor(by_share, step, steps) for step in range(steps)]
    assert factors == [rate_factor(by_steps, step, steps) for step in range(steps)]
    assert factors.index(1.0) == warm_up


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "both set the warm-up"),
        ({"warmup_ratio": 1.0}, "less than 1"),
        ({"warmup_ratio": 30}, "less than 1"),
        ({"kind": "constant", "final_ratio": 0.1}, "where a decay ends"),
    ],
)
def test_schedules_with_useless_keys_are_refused(keys: dict[str, object], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        RateSchedule.model_validate(keys)


def interrupt(step: int) -> float:
    raise KeyboardInterrupt("enough")


def test_what_an_own_schedule_does_wrong_is_named() -> None:
    assert rate_factor(lambda step: np.float32(0.5), 3, 10) == 0.5
    for schedule, pattern in (
        (lambda step: 1 / (step - 3), "schedule: it fails for step 3: ZeroDivisionError: division by zero"),
        (lambda step: sys.exit(7), r"schedule: it fails for step 3: SystemExit: 7 \(test_learning_rate.py:"),
        (interrupt, "schedule: it fails for step 3: KeyboardInterrupt: enough"),
        (lambda step: 10**400, "schedule: it fails for step 3: OverflowError"),
        (lambda step: float("nan"), "schedule: it returned nan for step 3; return a number of at least 0"),
        (lambda step: "1", "schedule: it returned '1' for step 3"),
    ):
        with pytest.raises(UserError, match=pattern):
            rate_factor(schedule, 3, 10)
