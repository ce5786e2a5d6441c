"""Workload: the measured samples that a planner plans for, and their packing into rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.dense import DenseRows
from dilatant.plan.errors import PlanError

MediaPairs = Mapping[str, Mapping[str, tuple[float, float, float]]]
"""Language model → encoder → (a, b, c): under its media mask, x tokens of the encoder add `a x n + b x + c x²` to the
square of a sample of n tokens."""


def squares_of(
    tokens: Mapping[str, NDArray[np.float64]], item_tokens: Mapping[str, float], media_pairs: MediaPairs
) -> dict[str, NDArray[np.float64]]:
    """Return by unit twice the token pairs that attend in each sample [samples], where that is not tokens².
    See `StepCosts` for the arguments."""
    squares = {unit: tokens[unit] * item for unit, item in item_tokens.items() if unit in tokens}
    for unit, encoders in media_pairs.items():
        if unit in tokens:
            seen = [
                (by_both * tokens[unit] + by_own + by_square * tokens[name]) * tokens[name]
                for name, (by_both, by_own, by_square) in encoders.items()
                if name in tokens
            ]
            squares[unit] = np.maximum(tokens[unit] ** 2 + sum(seen), 0.0)
    return squares


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Measured samples: `tokens[unit]` [samples] are the tokens of each sample in a unit.

    `squares[unit]` [samples] replaces tokens² where other pairs of tokens attend (see `squares_of`). `dense[unit]` is
    for units whose attention computes the masked area between samples of a packed row: the cost of a row of several
    samples is the square of all its tokens, times the factor that `DenseRows` gives for its length, instead of the sum
    of the samples' squares.
    """

    tokens: Mapping[str, NDArray[np.float64]]
    squares: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    dense: Mapping[str, DenseRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {unit: len(tokens) for unit, tokens in (*self.tokens.items(), *self.squares.items())}
        if len(set(sizes.values())) != 1:
            raise PlanError(f"every unit needs the tokens of the same samples; got {sizes}")

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.tokens.values())))

    def part(self, first: int, end: int) -> Workload:
        """Return samples `first <= s < end`."""
        return Workload(
            {unit: tokens[first:end] for unit, tokens in self.tokens.items()},
            {unit: squares[first:end] for unit, squares in self.squares.items()},
            self.dense,
        )

    def steps(self, global_batch: int) -> list[Workload]:
        """Split the samples into consecutive global batches. Raises PlanError unless their number is a multiple."""
        count, rest = divmod(self.num_samples, global_batch)
        if rest or not count:
            raise PlanError(f"{self.num_samples} samples are no whole number of global batches of {global_batch}")
        return [self.part(k * global_batch, (k + 1) * global_batch) for k in range(count)]

    def mean(self, unit: str) -> NDArray[np.float64]:
        """Return mean tokens² and tokens of a sample in `unit`, and the fraction of samples with any tokens: [3]."""
        squares, tokens = self.of_samples(unit)
        return np.array([squares.mean(), tokens.mean(), (tokens > 0).mean()])

    def mean_row(self, unit: str, samples: float) -> NDArray[np.float64]:
        """Return the multipliers of a cost triple for a microbatch of `samples` random samples: [3].
        They are the expected quadratic term, the expected tokens, and the probability of any tokens."""
        square, linear, present = self.mean(unit)
        quadratic = square * samples
        if unit in self.dense and samples > 1:
            # Expected square of a sum of independent samples.
            quadratic = quadratic + samples * (samples - 1) * linear**2
            quadratic = quadratic * float(self.dense[unit].at(np.sqrt(quadratic)))
        return np.array([quadratic, linear * samples, 1.0 - (1.0 - present) ** samples])

    def of_samples(self, unit: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (tokens², tokens) of each sample in `unit`: [samples] each."""
        tokens = np.asarray(self.tokens[unit], dtype=np.float64)
        return np.asarray(self.squares.get(unit, tokens**2), dtype=np.float64), tokens

    def lightest(self, unit: str) -> NDArray[np.float64]:
        """Return quadratic term, tokens and calls of the sample with the fewest tokens: [3]."""
        squares, tokens = self.of_samples(unit)
        return np.array([squares.min(), tokens.min(), float(tokens.min() > 0)])

    def heaviest(self, unit: str, global_batch: int) -> NDArray[np.float64]:
        """Return quadratic term, tokens and calls of the sample with the most tokens, mean over global batches: [3]."""
        squares, tokens = (column.reshape(-1, global_batch) for column in self.of_samples(unit))
        at = np.arange(len(tokens)), tokens.argmax(axis=1)
        return np.array([squares[at].mean(), tokens[at].mean(), float((tokens[at] > 0).mean())])

    def least_row(self, unit: str, samples: float, split: bool = False) -> NDArray[np.float64]:
        """Return the least quadratic term, tokens and calls of the mean microbatch for any grouping of samples: [3].
        Microbatches have `samples` samples on average and at least one. A dense row costs least if all rows are alike;
        a row of one sample is not dense. split: microbatches may be cut further."""
        square, linear, present = self.mean(unit)
        quadratic = square * samples
        if unit in self.dense:
            together = quadratic if split else (linear * samples) ** 2
            quadratic = min(quadratic, min(1.0, self.dense[unit].least) * together)
        return np.array([quadratic, linear * samples, float(present == 1.0)])


def pack_rows(sizes: Sequence[float], row_tokens: float) -> tuple[tuple[int, ...], ...]:
    """Return rows of indices into `sizes`, each row summing to at most `row_tokens`; every index occurs once.

    Best-fit decreasing needs at most 11/9 of the fewest rows, plus one (Johnson, 1974). Rows and the samples in them
    keep the order of `sizes`, none of which exceeds `row_tokens`.
    """
    rows = rows_of(np.asarray(sizes, dtype=np.float64), row_tokens)
    members: list[list[int]] = [[] for _ in range(int(rows.max(initial=-1)) + 1)]
    for at, row in enumerate(rows.tolist()):
        members[row].append(at)
    return tuple(map(tuple, members))


def rows_of(sizes: NDArray[np.float64], row_tokens: float) -> NDArray[np.int64]:
    """Return the row of each sample by `pack_rows`, [samples]."""
    from dilatant.plan.costs._row_kernel import pack

    row_of = np.empty(len(sizes), dtype=np.int64)
    pack(sizes, float(row_tokens), row_of)
    return row_of
