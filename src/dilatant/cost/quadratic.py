"""Quadratic T(x) = a x² + b x + c: the growth of a layer's seconds or bytes with the tokens of a sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""Seconds or bytes in a file: finite and not negative."""


class Quadratic(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`a` per squared token, `b` per token, `c` per call; a list of the three in files.

    A packed row of samples costs a Σx² + b Σx + c: attention keeps samples apart, so squares are per sample.
    """

    a: Amount = 0.0
    b: Amount = 0.0
    c: Amount = 0.0

    def __call__(self, tokens: float) -> float:
        """Return the value for one sample of `tokens` tokens."""
        return (self.a * tokens + self.b) * tokens + self.c

    def __add__(self, other: Quadratic) -> Quadratic:
        return Quadratic(self.a + other.a, self.b + other.b, self.c + other.c)

    def rounded(self, digits: int = 6) -> Quadratic:
        """Return coefficients rounded to `digits` significant digits, which is the precision of a fit or data sheet."""
        return Quadratic(*(float(f"{value:.{digits}g}") for value in (self.a, self.b, self.c)))

    def scaled(self, factor: float) -> Quadratic:
        """Return `factor` times this quadratic."""
        return Quadratic(self.a * factor, self.b * factor, self.c * factor)


def fit(
    tokens: Sequence[float] | Sequence[tuple[float, float]], values: Sequence[float], square: bool = True
) -> tuple[Quadratic, float]:
    """Fit the non-negative quadratic that is nearest in relative error. Returns it and its largest relative error.

    Absolute errors would let the longest sample decide alone; a negative coefficient would predict nonsense outside the
    measured range. tokens: of one sample, or (tokens, sum of the samples' squares) of rows. Each coefficient needs a
    distinct value of `tokens`: with one value only b is fitted, with two, or without `square`, b and c. Raises
    ValueError without measurements or for values that are not positive.
    """
    given, y = np.asarray(tokens, dtype=np.float64), np.asarray(values, dtype=np.float64)
    x, squares = (given[:, 0], given[:, 1]) if given.ndim == 2 else (given, given**2)
    if len(x) == 0 or len(x) != len(y) or (x <= 0).any():
        raise ValueError(f"a fit needs one value for each positive token count, got {list(tokens)} and {list(values)}")
    if not y.any():
        return Quadratic(), 0.0
    if (y <= 0).any():
        raise ValueError(f"measured values must be positive, got {list(values)}")
    columns = {1: [1], 2: [1, 0]}.get(len(np.unique(x)), [2, 1, 0] if square else [1, 0])
    terms = (np.ones_like(x), x, squares)
    matrix = np.stack([terms[power] / y for power in columns], axis=1)
    scale = matrix.max(axis=0)
    best: tuple[float, dict[int, float]] | None = None
    for chosen in range(1, 2 ** len(columns)):
        active = [index for index in range(len(columns)) if chosen >> index & 1]
        solution, *_ = np.linalg.lstsq(matrix[:, active] / scale[active], np.ones(len(x)), rcond=None)
        if (solution < 0).any():
            continue
        residual = float(np.sum((matrix[:, active] / scale[active] @ solution - 1) ** 2))
        if best is None or residual < best[0]:
            best = residual, {columns[i]: float(v / scale[i]) for i, v in zip(active, solution, strict=True)}
    assert best is not None, "a single positive column always has a non-negative solution"
    found = Quadratic(best[1].get(2, 0.0), best[1].get(1, 0.0), best[1].get(0, 0.0)).rounded()
    error = float(np.abs((found.a * squares + found.b * x + found.c) / y - 1).max())
    return found, error
