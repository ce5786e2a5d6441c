"""Extra cost of dense attention over a packed row, which also computes token pairs of different samples.

Kernels without a mask compute little more than the visible pairs of a causal row, but in blocks: the shorter the row,
the more extra pairs. With a mask they compute all pairs. So the cost of a dense row, relative to that of one sample of
the same length, grows with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class DenseRows:
    """A row of several samples with `tokens[i]` tokens in total costs `times[i]` times the square of its tokens.

    Values between two lengths are interpolated; outside the range the nearest applies. Raises ValueError unless tokens
    are ascending and times are positive and not descending.
    """

    tokens: tuple[float, ...]
    times: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = np.asarray([self.tokens, self.times], dtype=np.float64)
        if not numbers.size or not np.isfinite(numbers).all() or numbers.min() < 0 or not self.times[0] > 0:
            raise ValueError("dense rows: tokens and times must be finite numbers, as many of each, above 0")
        if (np.diff(numbers[0]) <= 0).any() or (np.diff(numbers[1]) < 0).any():
            raise ValueError("dense rows: tokens must ascend, and times not descend")

    @classmethod
    def always(cls, times: float) -> DenseRows:
        """Return the same factor for every length."""
        return cls((0.0,), (times,))

    @classmethod
    def nearest(cls, tokens: Sequence[float], times: Sequence[float]) -> DenseRows:
        """Fit measured factors by least squares, constrained to be non-descending (by pooling neighbours) and at least
        1: work needed for one sample is needed for several. Weights are the squared tokens, because timing errors grow
        at most linearly with a row, while the measured effect grows with its square."""
        pools: list[tuple[float, float, int]] = []  # times, weight, number of lengths
        for length, own in zip(tokens, times, strict=True):
            pool = own, float(length) ** 2, 1
            while pools and pools[-1][0] >= pool[0]:
                before = pools.pop()
                weight = before[1] + pool[1]
                pool = (before[0] * before[1] + pool[0] * pool[1]) / weight, weight, before[2] + pool[2]
            pools.append(pool)
        found = [max(1.0, level) for level, _, count in pools for _ in range(count)]
        return cls(tuple(map(float, tokens)), tuple(float(f"{level:.6g}") for level in found))

    def at(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the factors at these lengths, in the shape of `tokens`."""
        return np.asarray(np.interp(np.asarray(tokens, dtype=np.float64), self.tokens, self.times))

    @property
    def least(self) -> float:
        """Return the factor of the shortest rows, which is the smallest."""
        return self.times[0]

    def or_dearer(self, other: DenseRows) -> DenseRows:
        """Return the larger factor of both at every length measured for either."""
        tokens = sorted({*self.tokens, *other.tokens})
        return DenseRows(tuple(tokens), tuple(np.maximum(self.at(tokens), other.at(tokens)).tolist()))
