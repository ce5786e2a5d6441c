"""Exact sums, independent of the layout: numbers are rounded to multiples of a power of two, whose sums are exact.

A floating-point sum depends on the order of its terms, hence on where samples run. In exact mode, gradients of samples
are summed as integers, losses as multiples in fp64, and squares for the norm as three integers each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

GRADIENT_BITS = 36
"""Gradients are rounded to multiples of 2 ** -36 (1.5e-11); their sums must stay below 2 ** 19 (5e5)."""
LOSS_BITS = 36
_SQUARE_BITS = (20, 50, 80)
_HALF = 26
_MOST = 2.0**56
"""Limit of the integers, which also encodes non-finite gradients; a sum that contains it stays above half of it."""


class ExactGradients:
    """The gradients of a rank's weights summed as integers: `totals` by logical name.

    parameters: logical name → parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._name_of = {parameter: name for name, parameter in parameters.items()}
        self.totals: dict[str, Tensor] = {}

    @contextmanager
    def adding(self, parameters: Iterable[nn.Parameter], dropped: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context for the backward of one sample: at its end, move the gradients of `parameters` into the totals, and
        discard those of `dropped`."""
        yield
        for parameter in parameters:
            if parameter.grad is not None:
                if not any(parameter is each for each in dropped):
                    self._add(self._name_of[parameter], parameter.grad)
                parameter.grad = None

    def _add(self, name: str, gradient: Tensor) -> None:
        number = to_integers(gradient)
        if name in self.totals:
            self.totals[name].add_(number).clamp_(-int(_MOST), int(_MOST))
        else:
            self.totals[name] = number


def to_integers(gradient: Tensor) -> Tensor:
    """Convert a gradient to int64; `to_numbers` converts back."""
    scaled = (gradient.detach().double() * 2.0**GRADIENT_BITS).round()
    # Non-finite gradients become positive, so that two of them do not cancel.
    return torch.where(scaled.abs() < _MOST, scaled, _MOST).long()


def to_numbers(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert integers back to gradients; values of 2 ** 19 or more become infinite."""
    numbers = integers.double()
    return (numbers * 2.0**-GRADIENT_BITS).masked_fill(numbers.abs() >= _MOST / 2, float("inf")).to(dtype)


def rounded_loss(loss: float) -> float:
    """Round a loss to a multiple of 2 ** -36: sums of such numbers are exact in fp64 below 2 ** 17."""
    return round(loss * 2.0**LOSS_BITS) / 2.0**LOSS_BITS if abs(loss) < 2.0**16 else loss


def square_sums(tensors: Iterable[Tensor]) -> list[float]:
    """Sum the squares of all numbers, as parts that can be added exactly over ranks in fp64: see `squares_of`."""
    totals = [0] * len(_SQUARE_BITS)
    for tensor in tensors:
        rest = tensor.detach().double().square()
        for level, bits in enumerate(_SQUARE_BITS):
            whole = (rest * 2.0**bits).floor()
            if not bool(torch.isfinite(whole).all()):
                return [float("inf")] * (2 * len(_SQUARE_BITS))
            totals[level] += int(whole.long().sum())
            rest = rest - whole * 2.0**-bits
    return [float(part) for total in totals for part in (total >> _HALF, total & ((1 << _HALF) - 1))]


def squares_of(sums: Sequence[float]) -> float:
    """Return the sum of squares from the parts of `square_sums`, added up over ranks."""
    if not all(map(math.isfinite, sums)):
        return math.inf
    total = 0
    for level, bits in enumerate(_SQUARE_BITS):
        high, low = (int(part) for part in sums[2 * level : 2 * level + 2])
        total += ((high << _HALF) + low) << (_SQUARE_BITS[-1] - bits)
    return total / (1 << _SQUARE_BITS[-1])
