"""From the shape of a pipeline to a Plan: which ranks run which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dilatant.config.recompute import Recompute
from dilatant.plan.cluster import Cluster
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan


@dataclass(frozen=True, slots=True)
class Chain:
    """`replicas` chains of stages, each on tp * cp devices of its own.

    `cuts[unit]` are the first layers of that unit's stages. Several units in one chain are colocated: their k-th
    stages share devices. A unit may have fewer stages than the chain; they are its first ones. `chunks` stages are on
    the same devices: the chain goes round its groups so often. `recompute[unit]`: as in `UnitPlan`. `ep[unit]`: ranks
    that divide its experts, 1 where it says nothing. `degrees[unit]`: the tp and cp of one that shares the devices
    otherwise.
    """

    replicas: int
    tp: int
    cp: int
    cuts: Mapping[str, tuple[int, ...]]
    chunks: int = 1
    recompute: Mapping[str, tuple[Recompute, ...]] = field(default_factory=dict)
    ep: Mapping[str, int] = field(default_factory=dict)
    degrees: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Groups of tp * cp devices in each replica."""
        return max(len(cuts) for cuts in self.cuts.values()) // self.chunks

    @property
    def gpus(self) -> int:
        """Devices of all replicas."""
        return self.replicas * self.tp * self.cp * self.groups


class RankOrder(StrEnum):
    """What lies side by side, and so inside a node: the stages of a pipeline (short ways for activations), those of the
    same width first; the same with each encoder next to what it feeds, whatever their widths; or the replicas of a
    stage (short ways for gradients)."""

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
    """The plan of some chains: units in the order of `layers` (their number of layers), edges from `feeds`.

    groups: by chain, the group of the cluster whose devices it takes; nothing where there is only one. Several chains
    may hold the same unit: their replicas follow each other, and recompute what any of them does.
    No tensor group crosses a node. Raises PlanError when the chains do not fit the cluster that way, in this order.
    """
    found: _Ranks = {}
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
                    for replica in _replicas(name, chain, count, number, found)
                ),
                tuple(feeds.get(name, ())),
                _most_recomputed([chain.recompute.get(name, ()) for chain in chains if name in chain.cuts]),
            )
            for name, count in layers.items()
        )
    )


_Ranks = dict[tuple[int, int, int], tuple[int, ...]]
"""(number of a chain, replica, place among its groups of devices) → ranks."""
_FRUGAL: tuple[Recompute, ...] = ("none", "block_keep_attention", "block")


def _most_recomputed(each: Sequence[tuple[Recompute, ...]]) -> tuple[Recompute, ...]:
    said = [own for own in each if own]
    return tuple(max(layer, key=_FRUGAL.index) for layer in zip(*said, strict=True))


def _replicas(name: str, chain: Chain, layers: int, number: int, ranks: _Ranks) -> list[Replica]:
    """Those of one unit in a chain."""
    ends = (*chain.cuts[name][1:], layers)
    return [
        Replica(
            tuple(
                Stage(
                    first,
                    end,
                    ranks[number, replica, stage % chain.groups],
                    *chain.degrees.get(name, (chain.tp, chain.cp)),
                    chain.ep.get(name, 1),
                )
                for stage, (first, end) in enumerate(zip(chain.cuts[name], ends))
            )
        )
        for replica in range(chain.replicas)
    ]


def _placed(chains: Sequence[Chain], cluster: Cluster, order: RankOrder) -> _Ranks:
    """The ranks of equal devices, counted from 0, for all groups of these chains."""
    pipelines = max((chain.replicas for chain in chains), default=1)

    def place(number: int, stage: int, replica: int) -> tuple[int, ...]:
        chain = chains[number]
        pipeline = replica * pipelines // chain.replicas  # replicas are spread evenly over the pipelines
        wide = -chain.tp * chain.cp  # wide ones first leave no gap
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
    ranks: _Ranks = {}
    following = 0
    for _, number, stage, replica in sorted(slots):
        tp, width = chains[number].tp, chains[number].tp * chains[number].cp
        following = _aligned(following, tp, width, cluster.gpus_per_node)
        ranks[number, replica, stage] = tuple(range(following, following + width))
        following += width
    if following > cluster.num_devices:
        raise PlanError(
            f"the stages need {following} devices with tensor groups inside nodes of {cluster.gpus_per_node}, "
            f"there are {cluster.num_devices}"
        )
    return ranks


def _aligned(first: int, tp: int, width: int, node: int) -> int:
    """The first rank from `first` on where tensor groups stay inside nodes, and the stage does if it can."""
    left = node - first % node
    if width <= node:
        return first if width <= left else first + left
    # A stage over several nodes (context parallel): its tensor groups must not straddle a border.
    while any((first + g) // node != (first + g + tp - 1) // node for g in range(0, width, tp)):
        first += 1
        if first % node == 0 and node % tp:
            raise PlanError(f"tensor groups of {tp} on {width} devices cannot stay inside nodes of {node}")
    return first
