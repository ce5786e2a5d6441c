"""Data statistics: token distributions of each unit and source, and token ratios between units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dilatant.data.index.sizes import SizesIndex

PERCENTILES = (5, 25, 50, 75, 95, 99)
BINS = 40
"""Most bins of a histogram; a joint histogram has at most half as many on each axis."""
REFUSALS_KEPT = 50


@dataclass(frozen=True, slots=True)
class BlendSource:
    """A source of a blend: its name, number of samples and sampling weight."""

    name: str
    samples: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of token counts: counts[i] samples have tokens in [edges[i], edges[i + 1]); the last bin is closed."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitStats:
    """Token statistics of one unit over the samples that have tokens in this unit.

    samples: their number. total: the sum of their tokens. percentiles: percent → tokens.
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
    """Tokens of `unit` per token of `to` over all samples, with the 95 % confidence interval [low, high].

    The interval covers the ratio in training runs on other samples of this data. correlation: between the tokens of
    both units over the samples; None if one of them is constant.
    """

    unit: str
    to: str
    ratio: float
    low: float
    high: float
    correlation: float | None


@dataclass(frozen=True, slots=True)
class JointHistogram:
    """Joint histogram: counts[i][j] samples are in bin i of `to_edges` (tokens of `to`) and bin j of `edges`."""

    unit: str
    to: str
    edges: tuple[float, ...]
    to_edges: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Statistics of one source. refused: samples that cannot be trained on. tokens: by unit. `tokens` and
    `target_tokens` count only samples that could be measured."""

    name: str
    samples: int
    weight: float
    refused: int
    target_tokens: int
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True)
class DataStats:
    """Statistics of a data set. samples: all; `problems` of them were not measured. mixes: combination of units with
    tokens → number of samples. refused: samples that training would refuse; `refusals` has the first reasons. joint:
    one histogram for each ratio whose two units both vary."""

    samples: int
    problems: int
    target_tokens: int
    mixes: dict[str, int]
    units: tuple[UnitStats, ...]
    ratios: tuple[UnitRatio, ...]
    joint: tuple[JointHistogram, ...] = ()
    sources: tuple[SourceStats, ...] = ()
    refused: int = 0
    refusals: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(index: SizesIndex, sources: Sequence[BlendSource] = (), max_length: int | None = None) -> DataStats:
    """Compute the statistics of an index. Samples that could not be measured are counted and otherwise ignored.

    sources: the sources of the blend, in order; default: one source without a name. max_length: most tokens of a
    sample that can be trained on.
    """
    sources = sources or (BlendSource("", len(index.tokens)),)
    good = np.ones(len(index.tokens), bool)
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
        ((tokens[:, column] > 0) << bit for bit, (column, _) in enumerate(encoders)), np.zeros(len(tokens), int)
    )
    numbers, counts = np.unique(pattern, return_counts=True)
    for number, count in sorted(zip(numbers.tolist(), counts.tolist()), key=lambda item: -item[1]):
        present = [unit for bit, (_, unit) in enumerate(encoders) if number >> bit & 1]
        mixes[" + ".join([*present, "text"])] = count
    why = index.refused(max_length)
    refused = np.fromiter(why, np.int64, len(why))
    return DataStats(
        samples=len(index.tokens),
        problems=len(index.problems),
        target_tokens=int(index.target_tokens[good].sum()),
        mixes=mixes,
        units=units,
        ratios=ratios,
        joint=tuple(
            _joint(one.unit, tokens[:, index.units.index(one.unit)], text_unit, language)
            for one in ratios
            if one.correlation is not None
        ),
        sources=tuple(_source_stats(index, sources, refused, good)),
        refused=len(refused),
        refusals=tuple(islice(why.values(), REFUSALS_KEPT)),
    )


def _unit_stats(unit: str, tokens: NDArray[np.int64]) -> UnitStats:
    some = tokens[tokens > 0]
    if not len(some):
        return UnitStats(unit, 0, 0, 0.0, 0.0, 0, 0, dict.fromkeys(PERCENTILES, 0.0), Histogram((0.0, 1.0), (0,)))
    low, high = int(some.min()), int(some.max())
    edges = _bins(low, high, BINS)
    counts = np.bincount(_bin_of(some, edges), minlength=len(edges) - 1)
    return UnitStats(
        unit=unit,
        samples=len(some),
        total=int(some.sum()),
        mean=float(some.mean()),
        std=float(some.std()),
        minimum=low,
        maximum=high,
        percentiles=dict(zip(PERCENTILES, np.percentile(some, PERCENTILES).tolist(), strict=True)),
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


def _bins(low: int, high: int, most: int) -> NDArray[np.int64]:
    """Return bin edges for integers from `low` to `high`: at most `most` bins of equal round width, at multiples of
    the width."""
    width = 1
    while high // width - low // width + 1 > most:
        head = int(str(width)[0])
        width = width // head * {1: 2, 2: 5, 5: 10}[head]
    first = low // width * width
    return np.arange(first, high + width + 1, width)


def _bin_of(values: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bin of every value, for edges from `_bins`."""
    return (values - edges[0]) // (edges[1] - edges[0])


def _joint(unit: str, tokens: NDArray[np.int64], text_unit: str, language: NDArray[np.int64]) -> JointHistogram:
    edges = [_bins(int(one.min()), int(one.max()), BINS // 2) for one in (language, tokens)]
    rows, columns = (len(one) - 1 for one in edges)
    cells = _bin_of(language, edges[0]) * columns + _bin_of(tokens, edges[1])
    counts = np.bincount(cells, minlength=rows * columns).reshape(rows, columns)
    return JointHistogram(
        unit,
        text_unit,
        edges=tuple(map(float, edges[1])),
        to_edges=tuple(map(float, edges[0])),
        counts=tuple(tuple(map(int, row)) for row in counts),
    )


def _source_stats(
    index: SizesIndex, sources: Sequence[BlendSource], refused: NDArray[np.int64], good: NDArray[np.bool_]
) -> Iterator[SourceStats]:
    start = 0
    for source in sources:
        own = slice(start, start + source.samples)
        start += source.samples
        measured = index.tokens[own][good[own]]
        yield SourceStats(
            source.name,
            source.samples,
            source.weight,
            int(((refused >= own.start) & (refused < own.stop)).sum()),
            int(index.target_tokens[own][good[own]].sum()),
            dict(zip(index.units, measured.sum(axis=0).tolist())),
        )
