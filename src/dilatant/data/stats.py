"""What a data set is like, in numbers: token distributions per unit, and how units compare."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.data.sizes import SizesIndex

PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 40


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts[i] samples have tokens in [edges[i], edges[i + 1]); the last bin includes its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitStats:
    """Tokens of one unit over the samples that have any.

    samples: how many have any. total: tokens in all. percentiles: percent → tokens.
    """

    unit: str
    samples: int
    total: int
    mean: float
    std: float
    minimum: int
    maximum: int
    percentiles: dict[int, float]
    histogram: Histogram


@dataclass(frozen=True, slots=True)
class UnitRatio:
    """Tokens of a unit for each token of another, over all samples, with its 95 % confidence interval: what a
    training run as long as another sample of this data would show.

    correlation: between the tokens of both over the samples; None where one does not vary.
    """

    unit: str
    to: str
    ratio: float
    low: float
    high: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class DataStats:
    """samples: all, with `problems` of them not measured. mixes: units with tokens → samples with just those."""

    samples: int
    problems: int
    target_tokens: int
    mixes: dict[str, int]
    units: tuple[UnitStats, ...]
    ratios: tuple[UnitRatio, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(index: SizesIndex) -> DataStats:
    """The statistics of an index; samples that could not be measured are counted and otherwise left out."""
    good = np.ones(len(index), bool)
    good[list(index.problems)] = False
    tokens = index.tokens[good]
    units = tuple(_unit_stats(unit, tokens[:, column]) for column, unit in enumerate(index.units))
    text_unit, *_ = index.units
    language = tokens[:, 0]
    ratios = tuple(
        _ratio(unit, tokens[:, column], text_unit, language)
        for column, unit in enumerate(index.units)
        if unit != text_unit and tokens[:, column].any()
    )
    mixes: dict[str, int] = {}
    encoders = [(column, unit) for column, unit in enumerate(index.units) if unit != text_unit]
    pattern = sum(
        ((tokens[:, column] > 0) << bit for bit, (column, _) in enumerate(encoders)),
        np.zeros(len(tokens), int),
    )
    numbers, counts = np.unique(pattern, return_counts=True)
    for number, count in sorted(zip(numbers.tolist(), counts.tolist()), key=lambda item: -item[1]):
        present = [unit for bit, (_, unit) in enumerate(encoders) if number >> bit & 1]
        mixes[" + ".join([*present, "text"])] = count
    return DataStats(
        samples=len(index),
        problems=len(index.problems),
        target_tokens=int(index.target_tokens[good].sum()),
        mixes=mixes,
        units=units,
        ratios=ratios,
    )


def _unit_stats(unit: str, tokens: NDArray[np.int64]) -> UnitStats:
    some = tokens[tokens > 0]
    if not len(some):
        return UnitStats(
            unit, 0, 0, 0.0, 0.0, 0, 0, dict.fromkeys(PERCENTILES, 0.0), Histogram((0.0, 1.0), (0,))
        )
    low, high = int(some.min()), int(some.max())
    # Whole-number bin edges, so that no bin holds more values than its neighbour.
    width = max(1, -(-(high - low + 1) // BINS))
    edges = np.arange(low, high + width + 1, width)
    counts, _ = np.histogram(some, edges)
    return UnitStats(
        unit=unit,
        samples=len(some),
        total=int(some.sum()),
        mean=float(some.mean()),
        std=float(some.std()),
        minimum=low,
        maximum=high,
        percentiles={percent: float(np.percentile(some, percent)) for percent in PERCENTILES},
        histogram=Histogram(tuple(map(float, edges)), tuple(map(int, counts))),
    )


def _ratio(unit: str, tokens: NDArray[np.int64], text_unit: str, language: NDArray[np.int64]) -> UnitRatio:
    """Ratio of means; its variance by the delta method (Cochran, "Sampling Techniques", 1977, section 2.11)."""
    ratio = float(tokens.sum() / language.sum())
    count = len(tokens)
    error = 0.0
    if count > 1:
        residual = tokens - ratio * language
        error = float(np.sqrt((residual**2).sum() / (count - 1) / count) / language.mean())
    varies = tokens.std() > 0 and language.std() > 0
    correlation = float(np.corrcoef(tokens, language)[0, 1]) if varies else None
    return UnitRatio(unit, text_unit, ratio, ratio - 1.96 * error, ratio + 1.96 * error, correlation)
