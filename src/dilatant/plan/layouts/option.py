"""Options: layouts of one unit, or of several colocated units, with their contribution to a step."""

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

    `seconds` and `backward` (part of `seconds`) are [stages]; `work` and `forward` are [groups of devices], see
    `MeanCosts`; with `chunks`, a group has that many stages. `room`: how many stages may follow the chain before its
    in-flight microbatches overflow memory (negative: it does not fit). `gradient_bytes` [groups]: bytes that a rank
    syncs. `light` [stages] and `heavy`: seconds of the lightest sample in each stage and of the heaviest in all;
    `light_split` and `heavy_split`: see `MeanCosts`. `recompute`, `degrees`: as in `Chain`; `ep`: degree of the unit
    that is cut. `total`: seconds until the first microbatch has passed the chain, of which `slowest` belong to the
    steady state and `forwards` to forwards. `lightest` and `lightest_split` are the sums of `light` and `light_split`.
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
    """Contribution of a chain to the step of equal pipelines, in seconds.
    stages: lower bound of its stages after the arrival of the first microbatch; path: lower bound of the heaviest
    sample's time through the chain; `_split`: the same with split backwards. exposed_sync: gradient sync of a rank
    after its last backward, on rings over neighbouring replicas."""

    stages: float
    path: float
    stages_split: float
    path_split: float
    exposed_sync: float

    @property
    def least(self) -> float:
        """Seconds that no schedule of the chain beats."""
        return min(max(self.stages, self.path), max(self.stages_split, self.path_split))
