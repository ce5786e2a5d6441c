"""Metrics of generated answers: those of the field, and functions that a user supplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dilatant.config.errors import UserError, own_code
from dilatant.config.signatures import import_declared, require_call

Metric = Callable[[Sequence[str], Sequence[str]], float]
"""(expected answers, written answers) → a number."""

ANLS_THRESHOLD = 0.5
"""Similarity below which a text counts as wrong (Biten et al. 2019, "Scene Text Visual Question Answering")."""


def exact_match(expected: Sequence[str], written: Sequence[str]) -> float:
    """Return the share of answers that equal the expected ones but for blanks around them, in [0, 1]."""
    right = sum(wanted.strip() == answer.strip() for wanted, answer in zip(expected, written, strict=True))
    return right / max(1, len(expected))


def anls(expected: Sequence[str], written: Sequence[str]) -> float:
    """Return the average normalised Levenshtein similarity, in [0, 1]: case-insensitive, 0 below `ANLS_THRESHOLD`."""
    total = 0.0
    for wanted, answer in zip(expected, written, strict=True):
        wanted, answer = wanted.strip().lower(), answer.strip().lower()
        similar = 1 - edits(wanted, answer) / max(len(wanted), len(answer), 1)
        total += similar if similar >= ANLS_THRESHOLD else 0.0
    return total / max(1, len(expected))


def wer(expected: Sequence[str], written: Sequence[str]) -> float:
    """Return the word error rate: word edits over expected words, of all answers together. It may exceed 1."""
    pairs = [(wanted.split(), answer.split()) for wanted, answer in zip(expected, written, strict=True)]
    return sum(edits(*pair) for pair in pairs) / max(1, sum(len(wanted) for wanted, _ in pairs))


METRICS: dict[str, Metric] = {"exact_match": exact_match, "anls": anls, "wer": wer}


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Count insertions, deletions and replacements between two sequences (Levenshtein 1966)."""
    before = list(range(len(other) + 1))
    for number, item in enumerate(one, 1):
        row = [number]
        for place, there in enumerate(other, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (item != there)))
        before = row
    return before[-1]


def find_metric(name: str) -> Metric:
    """Return one of `METRICS`, or the function that `module:function` names, see `import_declared`. Raises
    UserError."""
    if name in METRICS:
        return METRICS[name]
    found = import_declared("evaluation.metrics", name, "metric")
    require_call(f"evaluation.metrics: {name!r}", found, "expected", "written")
    return found


def measure(name: str, expected: Sequence[str], written: Sequence[str], own: Metric | None = None) -> float:
    """Return the value of a metric. own: the function, if the user passed it. Raises UserError if a user's metric fails
    or returns no number."""
    metric = own or find_metric(name)
    if own is None and name in METRICS:
        return metric(expected, written)
    with own_code(f"evaluation.metrics: {name!r} makes no number of the expected and the written texts"):
        value = float(metric(list(expected), list(written)))
    if math.isnan(value):
        raise UserError(f"evaluation.metrics: {name!r} returned nan for {len(expected)} answers")
    return value
