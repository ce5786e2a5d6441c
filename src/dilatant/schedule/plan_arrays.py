"""A Plan as arrays: the order of stages, their ranks and their unit replicas.

Code that walks a plan many thousand times (families, the simulator) reads these arrays. They hold no information beyond
that of `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import PlacedStage, Plan


@dataclass(frozen=True, slots=True, eq=False)
class PlanArrays:
    """A plan's stages and chains: stages are numbered by `PlacedStage.index`, chains (unit replicas) in plan order.

    `unit_of[chain]` indexes `units`; `stages_of[chain]` is the half-open range of its stages. `before[stage]` and
    `after[stage]` are the neighbours in the same chain, -1 at its ends. `feeds` lists pairs of unit indices.
    `lead[stage]` is the position, in `ranks`, of the stage's first rank.
    """

    placed: tuple[PlacedStage, ...]
    units: tuple[str, ...]
    feeds: tuple[tuple[int, int], ...]
    unit_of: NDArray[np.int64]
    replica_of: NDArray[np.int64]
    stages_of: NDArray[np.int64]
    chain: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    ranks: tuple[int, ...]
    lead: NDArray[np.int64]

    @property
    def num_chains(self) -> int:
        return len(self.unit_of)

    def chains_of(self, unit: int) -> list[int]:
        """Return the chain numbers of a unit's replicas, in replica order."""
        return [int(chain) for chain in np.flatnonzero(self.unit_of == unit)]


@lru_cache(maxsize=4)  # many schedules share one plan
def plan_arrays(plan: Plan) -> PlanArrays:
    """Return the arrays of `plan`. Raises ValueError if a unit feeds one that the plan lacks or that comes earlier."""
    placed = plan.stages()
    units = tuple(unit.name for unit in plan.units)
    number = {name: index for index, name in enumerate(units)}
    feeds = []
    for source, unit in enumerate(plan.units):
        for name in unit.feeds:
            if name not in number:
                raise ValueError(
                    f"unit {unit.name!r} feeds {name!r}, which this plan lacks; it has {list(units)}"
                )
            if number[name] <= source:
                raise ValueError(f"unit {unit.name!r} feeds {name!r}, which must come after it in the plan")
            feeds.append((source, number[name]))
    sizes = [
        (source, number, len(replica.stages))
        for source, unit in enumerate(plan.units)
        for number, replica in enumerate(unit.replicas)
    ]
    unit_of, replica_of, lengths = np.asarray(sizes, dtype=np.int64).reshape(-1, 3).T
    ends = np.cumsum(lengths)
    ranges = np.stack([ends - lengths, ends], axis=1)
    count = len(placed)
    before = np.arange(-1, count - 1)
    after = np.arange(1, count + 1)
    before[ranges[:, 0]] = -1
    after[ranges[:, 1] - 1] = -1
    ranks = plan.ranks
    position = {rank: index for index, rank in enumerate(ranks)}
    return PlanArrays(
        placed=placed,
        units=units,
        feeds=tuple(feeds),
        unit_of=unit_of,
        replica_of=replica_of,
        stages_of=ranges,
        chain=np.repeat(np.arange(len(lengths)), lengths),
        before=before,
        after=after,
        ranks=ranks,
        lead=np.asarray([position[stage.stage.ranks[0]] for stage in placed], dtype=np.int64),
    )
