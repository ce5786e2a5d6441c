"""The best evaluation: what is better, by how much, and when waiting for another one ends."""

from __future__ import annotations

import math

import pytest

from dilatant.config.train import EvaluationConfig
from dilatant.training.run_state import BestEvaluation


def after(values: list[float], **settings: object) -> BestEvaluation:
    how = EvaluationConfig(steps=1, **{"keep_best": "loss", **settings})
    best = BestEvaluation()
    for step, value in enumerate(values, 1):
        best = best.after(step, {str(how.keep_best): value}, how)
    return best


@pytest.mark.parametrize(
    ("values", "settings", "step", "since"),
    [
        ([3.0, 2.0, 2.5], {}, 2, 1),
        ([3.0, 3.0, 3.0], {}, 1, 2),  # a plateau is no gain
        ([3.0, 2.5, 2.75], {"min_delta": 0.5}, 1, 2),  # by exactly so much is not better
        ([3.0, 2.5, 2.25], {"min_delta": 0.5}, 3, 0),  # of the best, not of the last
        ([1.0, 2.0, 1.5], {"keep_best": "anls", "metrics": "anls"}, 2, 1),
        ([1.0, 0.5, 0.7], {"keep_best": "wer", "metrics": "wer"}, 2, 1),
        ([1.0, 0.5, 0.7], {"keep_best": "m:f", "metrics": "m:f", "mode": "min"}, 2, 1),
        ([math.nan, 2.0, math.nan, math.inf], {}, 2, 2),
    ],
)
def test_only_a_gain_beyond_the_bound_is_better(
    values: list[float], settings: dict[str, object], step: int, since: int
) -> None:
    best = after(values, **settings)
    assert (best.step, best.since) == (step, since)


def test_patience_ends_on_a_plateau_and_not_before() -> None:
    how = EvaluationConfig(steps=1, keep_best="loss", patience=3)
    ends = [after([1.0] * count, patience=3).ends(how) for count in range(6)]
    assert ends == [False, False, False, False, True, True]
    assert not after([1.0] * 9).ends(EvaluationConfig(steps=1, keep_best="loss"))


def test_an_evaluation_that_another_generation_repeats_counts_once() -> None:
    how, figures = EvaluationConfig(steps=1, keep_best="loss", patience=2), {"loss": 3.0}
    best = after([1.0, 2.0])
    assert best.after(3, figures, how).after(3, figures, how) == best.after(3, figures, how)
    unkept = BestEvaluation().after(3, figures, EvaluationConfig(steps=1))
    assert (unkept.step, unkept.counted) == (None, 3)


def test_nothing_before_the_first_evaluation_is_the_best() -> None:
    how = EvaluationConfig(steps=1, keep_best="loss", patience=1)
    assert not BestEvaluation().ends(how)
    first = after([math.nan], patience=1)
    assert (first.step, first.ends(how)) == (None, True)
    assert BestEvaluation.from_json(first.to_json()).since == 1
