"""Rank mapping: assign the ranks of a cluster to the stages of pipeline shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Recompute
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.unit_layers import LEVELS
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan


@dataclass(frozen=True, slots=True)
class Chain:
    """`replicas` copies of a chain of stages, each stage on `degrees.ranks` devices.

    `cuts[unit]`: first layers of the unit's stages. Units in one chain are colocated: their k-th stages share devices;
    a unit with fewer stages occupies the chain's first ones. `chunks`: stages per group of devices (interleaved
    pipeline). `recompute[unit]`: as in `UnitPlan`. `others[unit]`: degrees of a unit that divides the shared devices
    differently from the chain.
    """

    replicas: int
    degrees: Degrees
    cuts: Mapping[str, tuple[int, ...]]
    chunks: int = 1
    recompute: Mapping[str, tuple[Recompute, ...]] = field(default_factory=dict)
    others: Mapping[str, Degrees] = field(default_factory=dict)

    def degrees_of(self, unit: str) -> Degrees:
        return self.others.get(unit, self.degrees)

    @property
    def groups(self) -> int:
        """Groups of devices in each replica."""
        return max(len(cuts) for cuts in self.cuts.values()) // self.chunks

    @property
    def gpus(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.degrees.ranks * self.groups


class RankOrder(StrEnum):
    """Order of ranks: neighbours share a node and communicate fast.
    STAGES: the stages of a pipeline (fast activations), equally wide ones first. PIPELINES: the same with each encoder
    next to the unit it feeds, whatever their widths. REPLICAS: the replicas of a stage (fast gradient sync)."""

    STAGES = "stages"
    PIPELINES = "pipelines"
    REPLICAS = "replicas"


def map_ranks(
    chains: Sequence[Chain],
    layers: Mapping[str, int],
    feeds: Mapping[str, tuple[str, ...]],
    cluster: Cluster,
    order: RankOrder = RankOrder.STAGES,
    groups: Sequence[int] = (),
) -> Plan:
    """Build the plan of chains: units in the order of `layers` (unit → number of layers), edges from `feeds`.

    groups: for each chain, the cluster group whose devices it takes; empty for a homogeneous cluster. Several chains
    may hold one unit: its replicas are concatenated, and each layer recomputes the most that any of the chains does. No
    tensor-parallel group crosses a node. Raises PlanError when the chains do not fit the cluster in this order.
    """
    found: GroupRanks = {}
    for group, (own, first) in enumerate(zip(cluster.groups, cluster.firsts)):
        here = [number for number in range(len(chains)) if not groups or groups[number] == group]
        placed = _placed([chains[number] for number in here], own, order)
        found |= {
            (here[number], replica, stage): tuple(first + rank for rank in ranks)
            for (number, replica, stage), ranks in placed.items()
        }
        if not groups:
            break
    return Plan(
        tuple(
            UnitPlan(
                name,
                tuple(
                    replica
                    for number, chain in enumerate(chains)
                    if name in chain.cuts
                    for replica in replicas_of(name, chain, count, number, found)
                ),
                tuple(feeds.get(name, ())),
                _most_recomputed([chain.recompute.get(name, ()) for chain in chains if name in chain.cuts]),
            )
            for name, count in layers.items()
        )
    )


GroupRanks = dict[tuple[int, int, int], tuple[int, ...]]
"""(chain, replica, index of the device group in the chain) → ranks."""


def _most_recomputed(each: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    decided = [own for own in each if own]
    return tuple(max(layer, key=LEVELS.index) for layer in zip(*decided, strict=True))


def replicas_of(name: str, chain: Chain, layers: int, number: int, ranks: GroupRanks) -> list[Replica]:
    """Return the replicas of one unit, which has so many layers, in the chain with this number."""
    ends = (*chain.cuts[name][1:], layers)
    return [
        Replica(
            tuple(
                Stage(first, end, ranks[number, replica, stage % chain.groups], *chain.degrees_of(name))
                for stage, (first, end) in enumerate(zip(chain.cuts[name], ends))
            )
        )
        for replica in range(chain.replicas)
    ]


def _placed(chains: Sequence[Chain], cluster: Cluster, order: RankOrder) -> GroupRanks:
    """Assign ranks of a homogeneous cluster, counted from 0, to every device group of these chains."""
    pipelines = max((chain.replicas for chain in chains), default=1)

    def place(number: int, stage: int, replica: int) -> tuple[int, ...]:
        chain = chains[number]
        pipeline = replica * pipelines // chain.replicas  # replicas are spread evenly over the pipelines
        wide = -chain.degrees.ranks  # wide stages first: no gaps
        return {
            RankOrder.STAGES: (wide, pipeline, number, stage, replica),
            RankOrder.PIPELINES: (pipeline, number, stage, replica),
            RankOrder.REPLICAS: (wide, number, stage, replica),
        }[order]

    slots = [
        (place(number, stage, replica), number, stage, replica)
        for number, chain in enumerate(chains)
        for replica in range(chain.replicas)
        for stage in range(chain.groups)
    ]
    ranks: GroupRanks = {}
    following = 0
    for _, number, stage, replica in sorted(slots):
        tp, width = chains[number].degrees.tp, chains[number].degrees.ranks
        following = _aligned(following, tp, width, cluster.reach)
        ranks[number, replica, stage] = tuple(range(following, following + width))
        following += width
    if following > cluster.num_devices:
        raise PlanError(
            f"the stages need {following} devices with tensor groups inside nodes of {cluster.reach}, "
            f"there are {cluster.num_devices}"
        )
    return ranks


def _aligned(first: int, tp: int, width: int, node: int) -> int:
    """Return the first rank from `first` on that keeps tensor groups, and if possible the stage, inside nodes."""
    left = node - first % node
    if width <= node:
        return first if width <= left else first + left
    # A stage over several nodes (context parallel): its tensor groups must not straddle a border.
    while any((first + g) // node != (first + g + tp - 1) // node for g in range(0, width, tp)):
        first += 1
        if first % node == 0 and node % tp:
            raise PlanError(f"tensor groups of {tp} on {width} devices cannot stay inside nodes of {node}")
    return first
