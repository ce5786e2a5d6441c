"""Parallel chains: chains of several units side by side, reduced to the Pareto-optimal combinations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dilatant.plan.layouts.option import Option


@dataclass(frozen=True, slots=True, eq=False)
class ParallelChains:
    """Chains that run in parallel, before or after the language model."""

    options: tuple[Option, ...] = ()
    gpus: int = 0
    slowest: float = 0.0
    fill: float = 0.0
    stages: int = 0

    def beside(self, option: Option) -> ParallelChains:
        return ParallelChains(
            (*self.options, option),
            self.gpus + option.gpus,
            max(self.slowest, option.slowest),
            max(self.fill, option.total),
            max(self.stages, option.stages),
        )


def side_by_side(each: Sequence[Sequence[Option]], budget: int) -> list[list[ParallelChains]]:
    """Return [devices up to `budget`]: the Pareto-optimal combinations of one option of each list on at most that many
    devices."""
    combinations: Mapping[int, Sequence[ParallelChains]] = {0: [ParallelChains()]}
    for options in each:
        combinations = _extended(combinations, options, budget)
    return _cumulated(combinations, budget)


def _extended(
    combinations: Mapping[int, Sequence[ParallelChains]], options: Sequence[Option], budget: int
) -> dict[int, list[ParallelChains]]:
    """Return `combinations` with one of `options` added to each, on at most `budget` devices; only Pareto-optimal
    results."""
    old = [one for group in combinations.values() for one in group]
    gpus = np.add.outer([one.gpus for one in old], [option.gpus for option in options])
    slowest = np.maximum.outer([one.slowest for one in old], [option.slowest for option in options])
    fill = np.maximum.outer([one.fill for one in old], [option.total for option in options])
    found: dict[int, list[ParallelChains]] = defaultdict(list)
    least = np.full(budget + 1, np.inf)
    for flat in np.lexsort((fill.ravel(), slowest.ravel())).tolist():
        row, column = divmod(flat, len(options))
        devices = int(gpus[row, column])
        if devices <= budget and fill[row, column] < least[devices]:
            least[devices] = fill[row, column]
            found[devices].append(old[row].beside(options[column]))
    return found


def _cumulated(
    combinations: Mapping[int, Sequence[ParallelChains]], budget: int
) -> list[list[ParallelChains]]:
    """Return [devices up to `budget`]: the Pareto-optimal combinations on at most that many devices.
    Of equal combinations the one on the most devices is kept."""
    result: list[list[ParallelChains]] = []
    kept: list[ParallelChains] = []
    for devices in range(budget + 1):
        new = combinations.get(devices, ())
        if new:
            kept = [
                *(old for old in kept if not any(one.slowest <= old.slowest and one.fill <= old.fill for one in new)),
                *(
                    one
                    for one in new
                    if not any(
                        old.slowest <= one.slowest and old.fill <= one.fill
                        and (old.slowest, old.fill) != (one.slowest, one.fill)
                        for old in kept
                    )
                ),
            ]  # fmt: skip
        result.append(kept)
    return result
