"""Ways to run units that have replicas of their own beside the language model, and which of them others dominate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option import ChainTimes, Option

CHUNK = 256
"""Rows that are compared at once with those that are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run such a unit: `count` replicas of a chain, of which the fullest takes `uneven` times as long as the
    mean one where several share a microbatch."""

    option: Option
    count: int
    times: ChainTimes
    uneven: float

    @property
    def devices(self) -> int:
        return self.option.gpus * self.count

    @property
    def slowest(self) -> float:
        return self.uneven * self.option.slowest

    @property
    def total(self) -> float:
        return self.uneven * self.option.total


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
        left = [*self.left]
        left[place] -= way.devices
        return Row(
            (*self.options, way.option),
            (*self.counts, way.count),
            max(self.slowest, way.slowest),
            max(self.before, way.total) if is_encoder else self.before,
            self.after if is_encoder else max(self.after, way.total),
            max(self.sync, way.times.exposed_sync),
            tuple(left),
        )


def undominated(own: Sequence[Way], alone: bool) -> list[Way]:
    """Those that none other beats in all of slowest stage, fill and, unless the unit is alone there, devices; of equal
    ones that on the fewest devices."""
    order = sorted(own, key=lambda one: (one.slowest, one.total, one.devices, one.times.exposed_sync))
    kept: list[Way] = []
    least: list[tuple[float, int]] = []  # (fill, devices) of those kept
    for one in order:
        fill, devices = one.total, 0 if alone else one.devices
        if not any(total <= fill and fewer <= devices for total, fewer in least):
            kept.append(one)
            least.append((fill, devices))
    return kept


def joined(
    rows: Sequence[Row], own: Sequence[Way], place: int, is_encoder: bool, pruned: bool, last: bool
) -> list[Row]:
    """Each row with each way to run one more unit that has room on the group `place`; if `pruned`, only those that none
    other beats in all of slowest stage, fills and, unless it is the last unit, devices that are free."""
    devices = np.array([one.devices for one in own])
    old, new = np.nonzero(np.array([row.left[place] for row in rows])[:, None] >= devices)
    if pruned:
        total = np.array([one.total for one in own])[new]
        before, after = (np.array([getattr(row, end) for row in rows])[old] for end in ("before", "after"))
        if is_encoder:
            before = np.maximum(before, total)
        else:
            after = np.maximum(after, total)
        slowest = np.maximum(
            np.array([row.slowest for row in rows])[old], np.array([one.slowest for one in own])[new]
        )
        left = np.array([row.left for row in rows])[old]
        left[:, place] -= devices[new]
        kept = _best(slowest, before, after, left, last)
        old, new = old[kept], new[kept]
    return [rows[row].beside(own[way], place, is_encoder) for row, way in zip(old.tolist(), new.tolist())]


def _best(
    slowest: NDArray[np.float64],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    left: NDArray[np.int64],
    last: bool,
) -> list[int]:
    """Which rows no other beats, the quickest first. [rows] each, left: [rows, groups]."""
    order = np.lexsort((*-left.T[::-1], before + after, slowest))
    worth = np.column_stack([before, after, *([] if last else -left.T)])  # less is better
    kept: list[int] = []
    for first in range(0, len(order), CHUNK):
        chunk = order[first : first + CHUNK]
        if kept:
            chunk = chunk[~_beaten(worth[chunk], worth[kept])]
        known = len(kept)
        for row in chunk.tolist():
            if not (len(kept) > known and _beaten(worth[[row]], worth[kept[known:]])[0]):
                kept.append(row)
    return kept


def _beaten(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which rows some other is no worse than in everything."""
    return np.any(np.all(others[None] <= rows[:, None], axis=2), axis=1)


def least_by_devices(
    own: Sequence[Way], counts_devices: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(devices, the least seconds of all ways on so many or fewer), ascending; of any if devices do not count."""
    order = sorted((one.devices if counts_devices else 0, one.times.least) for one in own)
    devices, seconds = zip(*order)
    return np.array(devices), np.minimum.accumulate(seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Ways to run all such units, [ways] each: seconds of the slowest stage, until encoders (`before`), and until
    generators (`after`), have seen a first microbatch, and of sums of gradients; devices that they take of the language
    model's group. `by_devices`, for each unit, as of `least_by_devices`, of all ways that there are."""

    options: list[tuple[Option, ...]]
    counts: list[tuple[int, ...]]
    slowest: NDArray[np.float64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    sync: NDArray[np.float64]
    at_home: NDArray[np.int64]
    by_devices: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]
    room: float

    def least(self, free: int) -> float:
        """Seconds that no way beats of those that take so many devices of the language model's group or fewer."""
        found = 0.0
        for devices, seconds in self.by_devices:
            fitting = int(np.searchsorted(devices, free, side="right"))
            found = max(found, float(seconds[fitting - 1]) if fitting else np.inf)
        return found
