"""Pairs of chains: those of units beside each other that may be part of a step within a limit of time are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option_table import ROUNDING, FastestChains
from dilatant.plan.layouts.space import Space
from dilatant.plan.search.closed_form import Work, bend_of, chunked_seconds, unchunked_seconds

CLOSE_BELOW = 0.95
"""Least estimate of pipelines as a multiple of that of a part of their units: the weight gradients of others may fill
more of its bubbles."""


@dataclass(frozen=True, slots=True, eq=False)
class InTime:
    """Masks of chains [chains of the unit] that may be in time: the language model's as they are (`whole`) and in
    interleaved chunks, and those of the other units. omitted: least seconds of a microbatch in the busiest stage of
    what is left out."""

    whole: NDArray[np.bool_]
    chunked: NDArray[np.bool_]
    others: Mapping[str, NDArray[np.bool_]]
    omitted: float


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Equal pipelines of the language model's chains with chains of `others` beside them, each as fast as without a
    limit of memory. there: mask of the language model's chains to consider. chunks: numbers of interleaved chunks."""

    space: Space
    replicas: int
    microbatches: int
    most_seconds: float
    language: FastestChains
    there: NDArray[np.bool_]
    others: Mapping[str, FastestChains]
    budget: int
    chunks: Sequence[int]

    def in_time(self) -> InTime:
        """Return the chains that are in time with some chain of each other unit."""
        language, most = self.language, max(self.chunks, default=1)
        fast = self._is_fast(language.slowest)
        omitted = float(language.busiest[self.there & ~fast].min(initial=math.inf))
        worth = {unit: np.zeros(len(known.gpus), dtype=np.bool_) for unit, known in self.others.items()}
        masks, least = [], math.inf
        for chunks, there in ((1, fast), (most, self._is_fast(language.mean) & (most > 1))):
            busiest = language.busiest if chunks == 1 else language.mean
            rows = np.flatnonzero(self.there & there)
            is_worth = self._alone(rows, chunks)
            omitted = min(omitted, float(busiest[rows[~is_worth]].min(initial=math.inf)))
            rows = rows[is_worth]
            pairs = [self._pairs(rows, known, chunks, busiest) for known in self.others.values()]
            is_worth = np.all([np.ones(len(rows), dtype=np.bool_), *(own.any(axis=1) for own, _ in pairs)], axis=0)
            bounds = np.max([busiest[rows], *(bound for _, bound in pairs)], axis=0)
            omitted = min(omitted, float(bounds[~is_worth].min(initial=math.inf)))
            rows = rows[is_worth]
            least = min(least, float(busiest[rows].min(initial=math.inf)))
            for unit, (own, _) in zip(self.others, pairs):
                worth[unit] |= own[is_worth].any(axis=0)
            masks.append(np.isin(np.arange(len(self.there)), rows))
        for unit, known in self.others.items():
            left_out = (known.gpus <= self.budget) & ~worth[unit]
            omitted = min(omitted, max(least, float(known.busiest[left_out].min(initial=math.inf))))
        return InTime(masks[0], masks[1], worth, omitted)

    def _is_fast(self, seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
        return np.asarray(self.microbatches * seconds * ROUNDING <= self.most_seconds)

    def _times(self, rows: NDArray[np.int64], chunks: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the slowest stage's and all seconds of the language model's chains; the least for interleaved ones."""
        if chunks == 1:
            return self.language.slowest[rows], self.language.total[rows]
        mean = self.language.mean[rows]
        return mean, mean + (self.language.total[rows] - mean) / chunks

    def _alone(self, rows: NDArray[np.int64], chunks: int) -> NDArray[np.bool_]:
        """Return [rows]: True if the chains may be in time without other units."""
        slowest, total = self._times(rows, chunks)
        return self._may_be_in_time(total, slowest, chunks, _work(self.language, rows))

    def _pairs(
        self, rows: NDArray[np.int64], known: FastestChains, chunks: int, busiest: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return which of another unit's chains may be in time with the language model's [rows, chains], and the least
        seconds of the busiest stage with any of them [rows]."""
        own = np.zeros((len(rows), len(known.gpus)), dtype=np.bool_)
        fits = self.language.gpus[rows, None] + known.gpus <= self.budget
        bounds = np.where(fits, np.maximum(busiest[rows, None], known.busiest), math.inf).min(axis=1, initial=math.inf)
        columns = np.flatnonzero(self._is_fast(known.slowest) & fits.any(axis=0))
        slowest, total = (one[:, None] for one in self._times(rows, chunks))
        fill, slowest = total + known.total[columns], np.maximum(slowest, known.slowest[columns])
        work = zip(_work(self.language, rows), _work(known, columns))
        both = Work(*(mine[:, None] + theirs for mine, theirs in work))
        own[:, columns] = fits[:, columns] & self._may_be_in_time(fill, slowest, chunks, both)
        return own, bounds

    def _may_be_in_time(
        self, fill: NDArray[np.float64], slowest: NDArray[np.float64], chunks: int, work: Work
    ) -> NDArray[np.bool_]:
        step = self.space, self.replicas, self.microbatches, fill, slowest
        return np.asarray(least_step(*step, work if chunks == 1 else None) * CLOSE_BELOW <= self.most_seconds)


def least_step(
    space: Space,
    replicas: int,
    microbatches: int,
    fill: NDArray[np.float64],
    slowest: NDArray[np.float64],
    work: Work | None,
) -> NDArray[np.float64]:
    """Return the least estimates of steps whose slowest stages take at least `slowest`, and at most `fill`. work: None
    in interleaved chunks.

    An estimate may fall with its slowest stage, where the heaviest microbatch delays few others. It is linear between
    these ends but for one upward bend (`bend_of`)."""
    most = np.maximum(fill, slowest)
    ends = (
        [slowest, most] if work is None else [slowest, most, np.clip(bend_of(microbatches, fill, work), slowest, most)]
    )
    steps = [(space, replicas, microbatches, fill, end) for end in ends]
    return np.min([chunked_seconds(*one) if work is None else unchunked_seconds(*one, work) for one in steps], axis=0)


def _work(known: FastestChains, rows: NDArray[np.int64]) -> Work:
    return Work(known.forwards[rows], known.total[rows], known.heaviest[rows], known.heaviest_split[rows])
