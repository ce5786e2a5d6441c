"""Ways to run units that are on other groups of devices than the language model, and which of them others dominate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.option import ChainTimes, Option


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a unit that is away: `count` replicas of a chain."""

    option: Option
    count: int
    times: ChainTimes

    @property
    def devices(self) -> int:
        return self.option.gpus * self.count


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One way to run some of the units; `left`: devices of each group that are free still."""

    options: tuple[Option, ...]
    counts: tuple[int, ...]
    slowest: float
    before: float
    after: float
    sync: float
    left: tuple[int, ...]

    def beside(self, way: Way, place: int, is_encoder: bool) -> Row:
        left, option = [*self.left], way.option
        left[place] -= way.devices
        return Row(
            (*self.options, option),
            (*self.counts, way.count),
            max(self.slowest, option.slowest),
            max(self.before, option.total) if is_encoder else self.before,
            self.after if is_encoder else max(self.after, option.total),
            max(self.sync, way.times.exposed_sync),
            tuple(left),
        )


def undominated(own: Sequence[Way], alone: bool) -> list[Way]:
    """Those that none other beats in all of slowest stage, fill and, unless the unit is alone there, devices; of equal
    ones that on the fewest devices."""
    order = sorted(
        own, key=lambda one: (one.option.slowest, one.option.total, one.devices, one.times.exposed_sync)
    )
    kept: list[Way] = []
    least: list[tuple[float, int]] = []  # (fill, devices) of those kept
    for one in order:
        devices = 0 if alone else one.devices
        if not any(total <= one.option.total and fewer <= devices for total, fewer in least):
            kept.append(one)
            least.append((one.option.total, devices))
    return kept


def best_rows(rows: Sequence[Row], last: bool) -> list[Row]:
    """Those that none other beats in all of slowest stage, fills and, if more units follow, devices that are free."""
    kept: list[Row] = []
    for row in sorted(
        rows, key=lambda row: (row.slowest, row.before + row.after, [-free for free in row.left])
    ):
        if not any(
            other.before <= row.before
            and other.after <= row.after
            and (last or all(there >= here for there, here in zip(other.left, row.left)))
            for other in kept
        ):
            kept.append(row)
    return kept


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Ways to run all units that are away, [ways] each: `seconds` of the slowest stage, until encoders, and until
    generators, have seen a first microbatch, and of sums of gradients. bound: the least of all that there are."""

    options: list[tuple[Option, ...]]
    counts: list[tuple[int, ...]]
    slowest: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    sync: NDArray[np.float64]
    bound: float
    room: float
