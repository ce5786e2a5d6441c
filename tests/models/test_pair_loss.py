"""Settings of the losses of pairs do what they say, and extreme answers have finite losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dilatant.config.train import PreferencesConfig
from dilatant.models.language.pair_loss import PairLoss

SUMS = torch.tensor([[-3.0, -4.0], [-6.0, -2.5]], dtype=torch.float64)
COUNTS = torch.tensor([[3.0, 2.0], [4.0, 5.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-3.5, -3.0], [-5.0, -4.0]], dtype=torch.float64)


def losses(**settings: Any) -> torch.Tensor:
    how = PreferencesConfig(**settings)
    return PairLoss(how).judge(SUMS, COUNTS, REFERENCE if how.has_reference else None)[0]


def test_smoothing_mixes_both_orders_and_sft_adds_the_mean_cross_entropy() -> None:
    margins = 0.3 * ((SUMS - REFERENCE)[:, 0] - (SUMS - REFERENCE)[:, 1])
    right, wrong = torch.log(1 + torch.exp(-margins)), torch.log(1 + torch.exp(margins))
    torch.testing.assert_close(losses(beta=0.3, label_smoothing=0.2), 0.8 * right + 0.2 * wrong)
    added = losses(beta=0.3, sft_weight=0.5) - right
    torch.testing.assert_close(added, torch.tensor([0.5 * 3 / 3, 0.5 * 6 / 4], dtype=torch.float64))
    closer = losses(method="simpo", beta=1.0, gamma=0.0)
    apart = losses(method="simpo", beta=1.0, gamma=2.0)
    torch.testing.assert_close(torch.expm1(closer) * torch.exp(torch.tensor(2.0)), torch.expm1(apart))


@pytest.mark.parametrize("method", ["dpo", "ipo", "simpo", "orpo"])
@pytest.mark.parametrize("sums", [(0.0, -1e4), (-1e4, 0.0), (-1e-9, -1e-9)])
def test_certain_and_impossible_answers_have_finite_slopes(method: Any, sums: tuple[float, float]) -> None:
    how = PreferencesConfig(method=method)
    both = torch.tensor([sums], dtype=torch.float64, requires_grad=True)
    reference = torch.zeros(1, 2, dtype=torch.float64) if how.has_reference else None
    found, _ = PairLoss(how).judge(both, torch.ones(1, 2, dtype=torch.float64), reference)
    (slope,) = torch.autograd.grad(found.sum(), both)
    assert found.isfinite().all()
    assert slope.isfinite().all()
    assert slope[0, 0] <= 0 <= slope[0, 1] or method == "ipo"
