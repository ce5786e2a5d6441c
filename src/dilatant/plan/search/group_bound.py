"""Lower bound over groups of different devices: a linear program that puts each piece of work where it is cheapest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.layouts.space import Space

_ROUNDS, _THIRDS = 3, 60


def least_seconds(spaces: Sequence[Space]) -> float:
    """Return a lower bound in seconds of the mean step over all plans on these device groups, one space each.

    Each unit's work on a sample may be divided freely among groups, on all their devices at once. The heaviest sample
    of a unit also takes at least its time on the best group at the best degrees. Any prices for device seconds of the
    groups give a bound (the dual of the linear program); prices are improved by shifting between pairs of groups.
    """
    devices = np.array([space.cluster.num_devices for space in spaces], dtype=np.float64)
    work = np.stack([_device_seconds(space) for space in spaces])
    steps = work.shape[1] // (len(spaces[0].roles.units) * spaces[0].global_batch)

    least = _Dual(work, devices, steps)
    prices = devices / devices.sum()
    for _ in range(_ROUNDS if len(spaces) > 2 else 1):
        for one, other in itertools.combinations(range(len(spaces)), 2):
            prices = least.shifted(prices, one, other)
    return max(least.at(prices), _heaviest(spaces))


def _heaviest(spaces: Sequence[Space]) -> float:
    """Return the seconds of the heaviest sample in its slowest unit, on the fastest group at the best degrees."""
    return max(
        min(
            float((layers.heaviest_split if space.settings.splits_backward else layers.heaviest).sum())
            for space in spaces
            for degrees in space.table.units.degrees([unit])
            for layers in [space.table.units.layers(unit, degrees, 1)]
        )
        for unit in spaces[0].roles.units
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Dual:
    """Dual bounds by price: `work` [groups, pieces] in device seconds, `devices` [groups]."""

    work: NDArray[np.float64]
    devices: NDArray[np.float64]
    steps: int

    def at(self, prices: NDArray[np.float64]) -> float:
        return float((self.work * (prices / self.devices)[:, None]).min(axis=0).sum()) / self.steps

    def shifted(self, prices: NDArray[np.float64], one: int, other: int) -> NDArray[np.float64]:
        """Return the best prices that differ for two groups only; the bound is concave in the split of their sum."""

        def with_share(share: float) -> NDArray[np.float64]:
            moved, both = prices.copy(), prices[one] + prices[other]
            moved[one], moved[other] = share * both, (1.0 - share) * both
            return moved

        low, high = 0.0, 1.0
        for _ in range(_THIRDS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self.at(with_share(left)) < self.at(with_share(right)):
                low = left
            else:
                high = right
        return max((prices, with_share((low + high) / 2)), key=self.at)


def _device_seconds(space: Space) -> NDArray[np.float64]:
    """Return the least device seconds of each sample in each unit, over all degrees: [units * samples]. A row of
    several dense samples costs at least the sum of their squares, times the minimum weight of a dense square."""
    units = space.table.units
    return np.concatenate(
        [
            min(1.0, units.least_dense(unit))
            * np.min([one.ranks * units.of_samples(unit, one) for one in units.degrees([unit])], axis=0)
            for unit in space.roles.units
        ]
    )
