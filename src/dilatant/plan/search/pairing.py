"""Pairs of chains: those of units beside each other that may be part of a step within a limit of time are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option_table import ROUNDING, FastestChains, OptionTable
from dilatant.plan.layouts.space import Space
from dilatant.plan.search.closed_form import Work, bend_of, chunked_seconds, unchunked_seconds

CLOSE_BELOW = 0.95
"""Least estimate of pipelines as a multiple of that of a part of their units: the weight gradients of others may fill
more of its bubbles."""


@dataclass(frozen=True, slots=True, eq=False)
class InTime:
    """Masks of chains [chains of the unit] that may be in time: the language model's as they are (`whole`) and in
    interleaved chunks, and those of the other units. known: the chains of each unit. omitted: least seconds of a
    microbatch in the busiest stage of what is left out."""

    whole: NDArray[np.bool_]
    chunked: NDArray[np.bool_]
    others: Mapping[str, NDArray[np.bool_]]
    known: Mapping[str, FastestChains]
    omitted: float


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """Chains in time, of the language model and of each other unit: masks. Seconds of a microbatch in the busiest
    stage, the least: of the language model's chains (`least`), and of what is left out (`omitted`)."""

    language: NDArray[np.bool_]
    others: Mapping[str, NDArray[np.bool_]]
    least: float
    omitted: float


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """Equal pipelines of the language model's chains with chains of `others` beside them. there: mask of the language
    model's chains to consider. chunks: numbers of interleaved chunks."""

    space: Space
    table: OptionTable
    replicas: int
    microbatches: int
    most_seconds: float
    language: FastestChains
    there: NDArray[np.bool_]
    others: Mapping[str, FastestChains]
    budget: int
    chunks: Sequence[int]

    def in_time(self) -> InTime:
        """Return the chains that are in time with some chain of each other unit: at first if each is as fast as without
        a limit of memory, then of these those that are in time within memory."""
        language, others, most = self.language, self.others, max(self.chunks, default=1)
        whole = self._beside(1, language, self.there, others)
        chunked = self._beside(most, language, self.there & (most > 1), others)
        omitted = self._omitted(whole, chunked, others)
        if math.isfinite(self.most_seconds) and (whole.language | chunked.language).any():
            language = self._within_memory(language, whole.language, False)
            others = {
                unit: self._within_memory(
                    known, whole.others[unit] | chunked.others[unit], unit in self.space.roles.encoders
                )
                for unit, known in others.items()
            }
            whole = self._beside(1, language, whole.language, others)
            chunked = self._beside(most, self.language, chunked.language, others)
            omitted = min(omitted, self._omitted(whole, chunked, others))
        return InTime(
            whole.language,
            chunked.language,
            {unit: own | chunked.others[unit] for unit, own in whole.others.items()},
            {self.space.roles.language: language, **others},
            omitted,
        )

    def _within_memory(self, known: FastestChains, mask: NDArray[np.bool_], is_ahead: bool) -> FastestChains:
        """Return the chains of a mask as fast as memory allows; all others take for ever. is_ahead: stages follow."""
        rows = np.flatnonzero(mask)
        times, busiest = np.full((2, len(mask)), math.inf), known.busiest.copy()
        times[:, rows] = self.table.in_memory(known, rows, self.microbatches, int(is_ahead))
        busiest[mask & np.isinf(times[0])] = math.inf
        return known._replace(slowest=times[0], total=times[1], busiest=busiest)

    def _beside(
        self, chunks: int, language: FastestChains, there: NDArray[np.bool_], others: Mapping[str, FastestChains]
    ) -> _Beside:
        """Return the language model's chains of the mask `there` that are in time, and the other units' with them."""
        busiest = language.busiest if chunks == 1 else language.mean
        fast = there & self._is_fast(language.slowest if chunks == 1 else language.mean)
        omitted = float(busiest[there & ~fast].min(initial=math.inf))
        rows = np.flatnonzero(fast)
        if not len(rows):
            nothing = {unit: np.zeros(len(known.gpus), dtype=np.bool_) for unit, known in others.items()}
            return _Beside(fast, nothing, math.inf, omitted)
        is_worth = self._alone(language, rows, chunks)
        omitted = min(omitted, float(busiest[rows[~is_worth]].min(initial=math.inf)))
        rows = rows[is_worth]
        pairs = [self._pairs(language, rows, known, chunks, busiest) for known in others.values()]
        is_worth = np.all([np.ones(len(rows), dtype=np.bool_), *(own.any(axis=1) for own, _ in pairs)], axis=0)
        bounds = np.max([busiest[rows], *(bound for _, bound in pairs)], axis=0)
        omitted = min(omitted, float(bounds[~is_worth].min(initial=math.inf)))
        rows = rows[is_worth]
        worth = {unit: np.asarray(own[is_worth].any(axis=0)) for unit, (own, _) in zip(others, pairs)}
        least = float(busiest[rows].min(initial=math.inf))
        mask = np.zeros(len(there), dtype=np.bool_)
        mask[rows] = True
        return _Beside(mask, worth, least, omitted)

    def _omitted(self, whole: _Beside, chunked: _Beside, others: Mapping[str, FastestChains]) -> float:
        """Return the least seconds of the busiest stage with chains that are in neither."""
        omitted, least = min(whole.omitted, chunked.omitted), min(whole.least, chunked.least)
        for unit, known in others.items():
            left_out = (known.gpus <= self.budget) & ~(whole.others[unit] | chunked.others[unit])
            omitted = min(omitted, max(least, float(known.busiest[left_out].min(initial=math.inf))))
        return omitted

    def _is_fast(self, seconds: NDArray[np.float64]) -> NDArray[np.bool_]:
        return np.asarray(self.microbatches * seconds * ROUNDING <= self.most_seconds)

    def _alone(self, language: FastestChains, rows: NDArray[np.int64], chunks: int) -> NDArray[np.bool_]:
        """Return [rows]: True if the chains may be in time without other units."""
        slowest, total = _times(language, rows, chunks)
        return self._may_be_in_time(total, slowest, chunks, _work(language, rows))

    def _pairs(
        self,
        language: FastestChains,
        rows: NDArray[np.int64],
        known: FastestChains,
        chunks: int,
        busiest: NDArray[np.float64],
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return which of another unit's chains may be in time with the language model's [rows, chains], and the least
        seconds of the busiest stage with any of them [rows]."""
        own = np.zeros((len(rows), len(known.gpus)), dtype=np.bool_)
        fits = language.gpus[rows, None] + known.gpus <= self.budget
        bounds = np.where(fits, np.maximum(busiest[rows, None], known.busiest), math.inf).min(axis=1, initial=math.inf)
        columns = np.flatnonzero(self._is_fast(known.slowest) & fits.any(axis=0))
        slowest, total = (one[:, None] for one in _times(language, rows, chunks))
        fill, slowest = total + known.total[columns], np.maximum(slowest, known.slowest[columns])
        work = zip(_work(language, rows), _work(known, columns))
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


def _times(
    language: FastestChains, rows: NDArray[np.int64], chunks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the slowest stage's and all seconds of the language model's chains; the least for interleaved ones."""
    if chunks == 1:
        return language.slowest[rows], language.total[rows]
    mean = language.mean[rows]
    return mean, mean + (language.total[rows] - mean) / chunks


def _work(known: FastestChains, rows: NDArray[np.int64]) -> Work:
    return Work(known.forwards[rows], known.total[rows], known.heaviest[rows], known.heaviest_split[rows])
