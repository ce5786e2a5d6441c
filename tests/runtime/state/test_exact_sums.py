"""Sums over ranks that are exact: in any order, in any parts, the same bits."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from dilatant.runtime.state.exact_sums import (
    ExactGradients,
    rounded_loss,
    square_sums,
    squares_of,
    to_integers,
    to_numbers,
)


def test_sum_of_squares_is_exact_for_any_partition() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(5000) * 10.0 ** torch.randint(-9, 4, (5000,))
    order = torch.randperm(5000)
    whole = squares_of(square_sums([numbers]))
    parts = [square_sums([numbers[order][first : first + 700]]) for first in range(0, 5000, 700)]
    assert squares_of([sum(each) for each in zip(*parts, strict=True)]) == whole
    assert whole == pytest.approx(float(sum(Fraction(n) ** 2 for n in numbers.tolist())), rel=1e-15)
    assert squares_of(square_sums([numbers, torch.tensor([float("nan")])])) == float("inf")


def test_gradients_of_samples_are_added_up_alike_in_any_order() -> None:
    torch.manual_seed(0)
    samples = [torch.randn(50) * 10.0 ** float(torch.randint(-6, 3, ())) for _ in range(40)]
    forward, backward = torch.zeros(50, dtype=torch.int64), torch.zeros(50, dtype=torch.int64)
    for one, other in zip(samples, reversed(samples), strict=True):
        forward += to_integers(one)
        backward += to_integers(other)
    assert torch.equal(forward, backward)
    wanted = torch.stack(samples).double().sum(0)
    # Each of 40 is rounded by half of 2 ** -36, the sum to fp32.
    torch.testing.assert_close(to_numbers(forward, torch.float32).double(), wanted, rtol=2**-23, atol=40 * 2**-37)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_what_is_not_finite_or_too_large_is_infinite_afterwards(wrong: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    gradients = ExactGradients({"weight": weight})
    for turn in range(100):
        with gradients.adding([weight], ()):
            weight.grad = torch.tensor([1.0, -wrong if turn % 2 else wrong])
    made = to_numbers(gradients.totals["weight"], torch.float32)
    assert made[0] == 100
    assert torch.isinf(made[1])


def test_losses_of_samples_are_added_up_alike_in_any_order() -> None:
    losses = [rounded_loss(value) for value in torch.randn(1000).abs().mul(5).tolist()]
    assert sum(losses) == sum(reversed(losses)) == sum(sorted(losses))
