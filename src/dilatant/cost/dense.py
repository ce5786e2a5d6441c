"""What attention costs that does not skip what the samples of a packed row hide from each other, by the row's length.

Kernels that take no mask compute of a causal row little more than the pairs that see each other, but in blocks: the
shorter the row, the more they compute beside. Under a mask they compute all pairs. So a dense row costs the more times
what one sample of its length costs the longer it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class DenseRows:
    """`times[i]` is how many times the square of its tokens a row of several samples counts that has `tokens[i]`.

    Between two lengths it is interpolated, outside it is that of the nearest. Raises ValueError unless tokens ascend
    and times, which are positive, do not descend.
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
        """The same at every length."""
        return cls((0.0,), (times,))

    @classmethod
    def nearest(cls, tokens: Sequence[float], times: Sequence[float]) -> DenseRows:
        """Those nearest to what was measured that do not descend (least squares, by pooling neighbours), and are
        nowhere below 1: nothing that is computed for one sample is left out for several. Longer rows weigh more, by
        the square of their tokens: what a clock is off by grows no faster than a row, what is looked for with its
        square."""
        pools: list[tuple[float, float, int]] = []  # times, weight, lengths
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
        """The times at these lengths, of the shape of `tokens`."""
        return np.asarray(np.interp(np.asarray(tokens, dtype=np.float64), self.tokens, self.times))

    @property
    def least(self) -> float:
        """The times of the shortest rows: no row has less."""
        return self.times[0]

    def or_dearer(self, other: DenseRows) -> DenseRows:
        """At every length measured of either, the dearer of both."""
        tokens = sorted({*self.tokens, *other.tokens})
        return DenseRows(tuple(tokens), tuple(np.maximum(self.at(tokens), other.at(tokens)).tolist()))

    def to_document(self) -> dict[str, list[float]]:
        """Plain values for JSON, which `from_document` reads back to the very same numbers."""
        return {"tokens": [*self.tokens], "times": [*self.times]}

    @classmethod
    def from_document(cls, document: Any) -> DenseRows:
        """Read what `to_document` wrote, or the one number of older files. Raises ValueError, TypeError or KeyError for
        what is neither."""
        if not isinstance(document, Mapping):
            return cls.always(float(document))
        return cls(tuple(map(float, document["tokens"])), tuple(map(float, document["times"])))
