"""Layouts of units with their own number of replicas next to the language model, reduced to the Pareto-optimal ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.option import ChainTimes, Option

CHUNK = 256
"""Rows that are compared at once with the rows already kept."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitLayout:
    """One layout of such a unit: `count` replicas of a chain.
    `uneven`: the fullest replica's seconds as a multiple of the mean, where several replicas share a microbatch."""

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
class JointLayout:
    """One combination of layouts of some of the units; `left`: free devices of each group."""

    options: tuple[Option, ...]
    counts: tuple[int, ...]
    slowest: float
    before: float
    after: float
    sync: float
    left: tuple[int, ...]

    def beside(self, layout: UnitLayout, place: int, is_encoder: bool) -> JointLayout:
        left = [*self.left]
        left[place] -= layout.devices
        return JointLayout(
            (*self.options, layout.option),
            (*self.counts, layout.count),
            max(self.slowest, layout.slowest),
            max(self.before, layout.total) if is_encoder else self.before,
            self.after if is_encoder else max(self.after, layout.total),
            max(self.sync, layout.times.exposed_sync),
            tuple(left),
        )


def pareto_layouts(own: Sequence[UnitLayout], alone: bool) -> list[UnitLayout]:
    """Return the Pareto-optimal layouts by slowest stage, fill and, unless the unit is alone on its group, devices.
    Of equal layouts the one on the fewest devices is kept."""
    order = sorted(own, key=lambda one: (one.slowest, one.total, one.devices, one.times.exposed_sync))
    kept: list[UnitLayout] = []
    least: list[tuple[float, int]] = []  # (fill, devices) of the kept layouts
    for one in order:
        fill, devices = one.total, 0 if alone else one.devices
        if not any(total <= fill and fewer <= devices for total, fewer in least):
            kept.append(one)
            least.append((fill, devices))
    return kept


def joined(
    rows: Sequence[JointLayout],
    own: Sequence[UnitLayout],
    place: int,
    is_encoder: bool,
    pruned: bool,
    last: bool,
) -> list[JointLayout]:
    """Return each row with each layout of one more unit that fits on the group `place`.
    If `pruned`, only rows that are Pareto-optimal by slowest stage, fills and, unless `last`, free devices."""
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
    return [
        rows[row].beside(own[layout], place, is_encoder) for row, layout in zip(old.tolist(), new.tolist())
    ]


def _best(
    slowest: NDArray[np.float64],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    left: NDArray[np.int64],
    last: bool,
) -> list[int]:
    """Return the indices of the Pareto-optimal rows, fastest first. Arrays are [rows]; left: [rows, groups]."""
    order = np.lexsort((*-left.T[::-1], before + after, slowest))
    worth = np.column_stack([before, after, *([] if last else -left.T)])  # less is better
    kept: list[int] = []
    for first in range(0, len(order), CHUNK):
        chunk = order[first : first + CHUNK]
        if kept:
            chunk = chunk[~_dominated(worth[chunk], worth[kept])]
        known = len(kept)
        for row in chunk.tolist():
            if not (len(kept) > known and _dominated(worth[[row]], worth[kept[known:]])[0]):
                kept.append(row)
    return kept


def _dominated(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the rows that some other row equals or beats in every column."""
    return np.any(np.all(others[None] <= rows[:, None], axis=2), axis=1)


def least_by_devices(
    own: Sequence[UnitLayout], counts_devices: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (devices, least seconds of any layout on at most that many), ascending; devices are 0 if not counted."""
    order = sorted((one.devices if counts_devices else 0, one.times.least) for one in own)
    devices, seconds = zip(*order)
    return np.array(devices), np.minimum.accumulate(seconds)


@dataclass(frozen=True, eq=False)
class UnitLayouts:
    """Layouts of all such units together, and for each unit `least_by_devices` of all its layouts. at_home: devices
    that each uses of the language model's group: [layouts]. headroom: the least of the encoders' options."""

    joint: Sequence[JointLayout]
    by_devices: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]
    at_home: NDArray[np.int64]
    headroom: float

    @cached_property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """Slowest stage, fill of encoders (`before`) and of generators (`after`), and gradient `sync`: [layouts]."""
        names = ("slowest", "before", "after", "sync")
        return {name: np.array([getattr(one, name) for one in self.joint]) for name in names}

    def least(self, free: int) -> float:
        """Return a lower bound in seconds of layouts that use at most `free` devices of the language model's group."""
        found = 0.0
        for devices, seconds in self.by_devices:
            fitting = int(np.searchsorted(devices, free, side="right"))
            found = max(found, float(seconds[fitting - 1]) if fitting else np.inf)
        return found
