"""Options: layouts of one unit, or of several colocated units, with their contribution to a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dilatant.plan.costs.unit_layers import MeanCosts
from dilatant.plan.rank_mapping import Chain

UNLIMITED = 1 << 30


@dataclass(frozen=True, eq=False)
class Option:
    """A chain of stages that holds all layers of one or more colocated units, with its costs.

    `costs`: of the mean microbatch, by stage or by group of devices (see `MeanCosts.on_groups`). `headroom`: how many
    stages may follow the chain before its in-flight microbatches overflow memory (negative: it does not fit).
    """

    chain: Chain
    costs: MeanCosts
    headroom: int

    @property
    def stages(self) -> int:
        return len(self.costs.seconds)

    @cached_property
    def gpus(self) -> int:
        return self.chain.degrees.ranks * (self.stages // self.chain.chunks)

    @cached_property
    def slowest(self) -> float:
        """Seconds per microbatch of the busiest group of devices in the steady state."""
        return float(self.costs.seconds.reshape(self.chain.chunks, -1).sum(axis=0).max())

    @cached_property
    def total(self) -> float:
        """Seconds until the first microbatch has passed the chain, of which `slowest` belong to the steady state."""
        total = float(self.costs.seconds.sum())
        chunks = self.chain.chunks
        return total if chunks == 1 else self.slowest + (total - self.slowest) / chunks

    @cached_property
    def forwards(self) -> float:
        """Forward seconds of the mean microbatch."""
        return float(self.costs.seconds.sum()) - float(self.costs.backward.sum())

    @cached_property
    def lightest(self) -> float:
        """Seconds of the lightest sample in all stages; `lightest_split` with split backwards."""
        return float(self.costs.lightest.sum())

    @cached_property
    def lightest_split(self) -> float:
        return float(self.costs.lightest_split.sum())

    @cached_property
    def heaviest(self) -> float:
        """Seconds of the heaviest sample in all stages; `heaviest_split` with split backwards."""
        return float(self.costs.heaviest.sum())

    @cached_property
    def heaviest_split(self) -> float:
        return float(self.costs.heaviest_split.sum())


class ChainTimes(NamedTuple):
    """Contribution of a chain to the step of equal pipelines, in seconds.
    stages: lower bound of its stages after the arrival of the first microbatch, with the backwards before them; synced:
    of its stages with their gradient sync, which runs beside those backwards; path: lower bound of the heaviest
    sample's time through the chain; `_split`: the same with split backwards. exposed_sync: gradient sync of a rank
    after its last backward, on rings over neighbouring replicas."""

    stages: float
    synced: float
    path: float
    stages_split: float
    path_split: float
    exposed_sync: float

    @property
    def least(self) -> float:
        """Seconds that no schedule of the chain beats."""
        return min(max(self.stages, self.synced, self.path), max(self.stages_split, self.path_split))
