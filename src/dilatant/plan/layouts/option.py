"""One way to lay out a unit, or several colocated ones, and what it adds to a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dilatant.config.recompute import Recompute

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A chain of stages on `tp * cp` devices each that holds all layers of one or more colocated units.

    `seconds` and of these `backward` are [stages], `work` and `forward` [groups of devices], see `MeanCosts`: with
    `chunks` a group has so many stages. `room` is how many stages may follow the chain before its in-flight
    microbatches overflow memory (negative: it does not fit at all); `gradient_bytes` [groups] what a rank must sync.
    `light` [stages] and `heavy` are the seconds of the lightest sample in each stage and of the heaviest in all, with
    `light_split` and `heavy_split` as in `MeanCosts`.
    `recompute`, `degrees`: as in `Chain`; `ep` that of the unit that is cut.
    `total` are the seconds until the chain has seen its first microbatch, of which `slowest` count as the first step of
    a steady state, and `forwards` those of forwards alone. `lightest`, `lightest_split`: the sums of `light` and of
    `light_split`.
    """

    tp: int
    cp: int
    cuts: Mapping[str, tuple[int, ...]]
    seconds: NDArray[np.float64]
    backward: NDArray[np.float64]
    work: NDArray[np.float64]
    forward: NDArray[np.float64]
    room: int
    gradient_bytes: NDArray[np.float64]
    light: NDArray[np.float64]
    heavy: float
    light_split: NDArray[np.float64]
    heavy_split: float
    chunks: int = 1
    recompute: Mapping[str, tuple[Recompute, ...]] = field(default_factory=dict)
    ep: int = 1
    degrees: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gpus: int = field(init=False)
    slowest: float = field(init=False)
    total: float = field(init=False)
    forwards: float = field(init=False)
    lightest: float = field(init=False)
    lightest_split: float = field(init=False)

    def __post_init__(self) -> None:
        groups = len(self.seconds) // self.chunks
        slowest = float(self.seconds.reshape(self.chunks, groups).sum(axis=0).max())
        total = float(self.seconds.sum())
        for name, value in (
            ("gpus", self.tp * self.cp * groups),
            ("slowest", slowest),
            ("total", total if self.chunks == 1 else slowest + (total - slowest) / self.chunks),
            ("forwards", total - float(self.backward.sum())),
            ("lightest", float(self.light.sum())),
            ("lightest_split", float(self.light_split.sum())),
        ):
            object.__setattr__(self, name, value)

    @property
    def stages(self) -> int:
        return len(self.seconds)


class ChainTimes(NamedTuple):
    """What a chain adds to the step of equal pipelines. stages: the least that its stages take after what comes before
    its first microbatch; path: the least of the heaviest sample's way; with `_split` where backwards are.
    exposed_sync: seconds that a rank sums gradients after its last backward, on rings over replicas that lie side by
    side."""

    stages: float
    path: float
    stages_split: float
    path_split: float
    exposed_sync: float

    @property
    def least(self) -> float:
        """Seconds that no schedule of the chain beats."""
        return min(max(self.stages, self.path), max(self.stages_split, self.path_split))
