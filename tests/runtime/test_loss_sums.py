"""What a rank adds to a step's losses: what it computed, and what was kept of a step that ranks were lost in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dilatant.runtime.step.loss_sums import ForwardOutcome, sum_losses, sum_sources
from dilatant.runtime.step.partial_step import LossShare

SOURCES = (0, 2, 1, 0, 2)
"""Of the samples of a step."""


def _data() -> Any:
    return SimpleNamespace(samples=[SimpleNamespace(id=str(n), source=s) for n, s in enumerate(SOURCES)])


def _outcome(name: str, samples: tuple[int, ...], *losses: float) -> ForwardOutcome:
    by_sample = torch.tensor(losses)
    return ForwardOutcome(name, by_sample.sum() / 8, samples, by_sample)


def _kept(samples: tuple[int, ...], values: dict[str, float], by_source: tuple[float, ...]) -> LossShare:
    return LossShare("language", 0, 2, (0,), samples, values, by_source)


@pytest.mark.parametrize("exact", [False, True])
def test_losses_by_source_do_not_depend_on_salvaged_samples(exact: bool) -> None:
    """Samples 0 to 4 lose 1, 2, 4, 8 and 16; losses are divided by 8."""
    computed = [_outcome("language", (0, 1), 1, 2), _outcome("language", (2, 3, 4), 4, 8, 16)]
    other = _outcome("image", (0,), 32)
    lost = [computed[0], other]
    kept = [_kept((2, 3), {"language": 12 / 8}, (8, 4, 0)), _kept((4,), {"language": 16 / 8}, (0, 0, 16))]
    for outcomes, salvaged in (([*computed, other], []), (lost, kept)):
        assert sum_sources(outcomes, _data(), salvaged, "language", 3) == [9, 4, 18]
        sums, nonfinite = sum_losses(outcomes, _data(), salvaged, exact)
        assert (sums, nonfinite) == ({"language": 31 / 8, "image": 4.0}, [])


def test_nothing_is_said_by_source_of_a_single_one() -> None:
    kept = [_kept((0,), {"language": 1.0}, ())]
    assert sum_sources([_outcome("language", (0,), 1)], _data(), kept, "language", 1) == []


def test_samples_of_a_loss_that_is_not_finite_are_named() -> None:
    outcomes = [_outcome("language", (0, 1), 1, 2), _outcome("language", (3, 4), float("nan"), 1)]
    _, nonfinite = sum_losses(outcomes, _data(), [], False)
    assert nonfinite == ["3", "4"]
