"""Metrics of answers against their definitions, written down slowly."""

from __future__ import annotations

import random
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from dilatant.config.errors import UserError
from dilatant.config.train import EvaluationConfig
from dilatant.training.evaluation.answer_metrics import anls, edits, exact_match, find_metric, wer
from dilatant.training.evaluation.scored_answers import load_judge
from dilatant.training.run_state import BestEvaluation


def slow_edits(one: str, other: str) -> int:
    @cache
    def between(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        replaced = between(i - 1, j - 1) + (one[i - 1] != other[j - 1])
        return min(replaced, between(i - 1, j) + 1, between(i, j - 1) + 1)

    return between(len(one), len(other))


def test_edits_are_those_of_the_recursive_definition() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one, other = ("".join(draw.choices("abc", k=draw.randrange(7))) for _ in range(2))
        assert edits(one, other) == slow_edits(one, other), (one, other)


def test_metrics_of_answers_worked_out_by_hand() -> None:
    expected, written = ["Paris", "42 %", "a b c d"], [" Paris ", "43 %", "x y"]
    assert exact_match(expected, written) == pytest.approx(1 / 3)
    assert anls(expected, written) == pytest.approx((1 + 3 / 4 + 0) / 3)  # the last is 1/7, below the threshold
    assert anls(["YES"], ["yes"]) == 1
    assert wer(expected, written) == pytest.approx((0 + 1 + 4) / (1 + 2 + 4))
    assert wer(["a"], ["a b c"]) == 2
    assert (exact_match([], []), anls([], []), wer([], [])) == (0, 0, 0)
    assert anls([""], [""]) == 1


def test_best_metric_improves_by_min_delta_and_is_never_nan() -> None:
    how = EvaluationConfig(steps=1, keep_best="loss", patience=2, min_delta=0.1)
    best = BestEvaluation()
    for step, (value, of) in enumerate(
        [(float("nan"), None), (3.0, 2), (2.95, 2), (2.8, 4), (float("nan"), 4), (2.75, 4)], 1
    ):
        best = best.after(step, {"loss": value}, how)
        assert best.step == of
    assert best.ends(how)
    assert BestEvaluation.from_json(best.to_json()) == best
    up = EvaluationConfig(steps=1, keep_best="exact_match", metrics=("exact_match",))
    best = BestEvaluation()
    for step, value in enumerate((0.2, 0.3, 0.1), 1):
        best = best.after(step, {"exact_match": value}, up)
    assert best == BestEvaluation(2, 0.3, 1, counted=3)


@pytest.mark.parametrize("takes", ["one", "one, two, three, four", "*, expected", ""])
def test_metric_or_judge_with_wrong_signature_is_one_line_error(
    takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"takes_{abs(hash(takes))}"
    (tmp_path / f"{module}.py").write_text(f"import dilatant\n@dilatant.metric\ndef judge({takes}): ...")
    monkeypatch.chdir(tmp_path)
    said = rf"called as \({{}}\), but takes \({re.escape(takes)}\)"
    with pytest.raises(UserError, match=said.format("expected, written")) as wrong:
        find_metric(f"{module}:judge")
    assert "\n" not in str(wrong.value)
    with pytest.raises(UserError, match=said.format("question, expected, answered")):
        load_judge(f"{module}.py:judge")


@pytest.mark.parametrize("name", ["pty:spawn", "os.path:join", "own_functions:plain", "own_functions:text"])
def test_only_functions_that_declare_themselves_are_metrics(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_functions.py").write_text(
        "import dilatant\ntext = 'x'\ndef plain(expected, written): return 0.0\n"
        "@dilatant.metric\ndef mine(expected, written): return 0.5\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{name}.*@dilatant.metric"):
        find_metric(name)
    assert find_metric("own_functions:mine")([], []) == 0.5


def test_standard_library_module_is_not_imported_as_a_metric() -> None:
    sys.modules.pop("this", None)
    with pytest.raises(UserError, match="not declared"):
        find_metric("this:d")
    assert "this" not in sys.modules
