"""Gradient sync time: seconds in which ranks sum gradients, overlapping their last backward or exposed."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dilatant.config.degrees import Degrees
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.costs.state_sharing import sharing_node
from dilatant.plan.model_spec import ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, UnitPlan

UPDATE_BYTES = 50.0
"""Bytes per weight that an update moves: the gradient is read for its norm (4), scaled (8) and cleared (4), a fused
AdamW reads and writes gradient, moments and master (28), and the master is rounded (6)."""


@dataclass(frozen=True, slots=True)
class SyncSeconds:
    """Seconds by rank. beside: gradient sums that may overlap the last backward, bucket by bucket. after: updates, and
    gathers of updated weights where holders shard optimizer state; begins when every rank has its sums."""

    beside: Mapping[int, float] = field(default_factory=dict)
    after: Mapping[int, float] = field(default_factory=dict)

    def of(self, rank: int) -> float:
        """Return all sync seconds of a rank, without overlap."""
        return self.beside.get(rank, 0.0) + self.after.get(rank, 0.0)

    @property
    def longest(self) -> float:
        return max(map(self.of, {**self.beside, **self.after}), default=0.0)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring collective: all-reduce passes the bytes twice round the ring, reduce-scatter and all-gather once."""

    size_bytes: float
    rounds: int
    ranks: Sequence[int]


@lru_cache(maxsize=4)  # called before a plan is simulated, and for its costs
def sync_seconds(plan: Plan, model: ModelSpec, cluster: Cluster, rules: ParameterBytes = BF16) -> SyncSeconds:
    """Return by rank the seconds to sum gradients among their holders and to gather updated weights.

    Holders are the context-parallel ranks of every replica of the layer. Without sharded state, they all-reduce. With
    sharded state, the ranks that share it reduce-scatter, all-reduce each part with the holders of the same part
    elsewhere, and all-gather the updated weights (`runtime.state.gradient_sync`).
    """
    sums: list[_Ring] = []
    gathers: list[_Ring] = []
    updated: dict[int, float] = defaultdict(float)  # weights by rank
    for unit in plan.units:
        for size_bytes, ranks in _groups(unit, model.unit(unit.name), rules):
            shards = Counter(sharing_node(rank, rules) for rank in ranks)
            for rank in ranks if rules.summed and rules.optimizer else ():
                shared = 1 if rules.zero == "none" else shards[sharing_node(rank, rules)]
                updated[rank] += size_bytes / rules.summed / shared
            if len(ranks) > 1 and size_bytes:
                _add_rings(size_bytes, ranks, rules, sums, gathers)
    beside, after = (_ring_seconds(rings, plan.ranks, cluster) for rings in (sums, gathers))
    for rank, weights in updated.items():
        after[rank] += UPDATE_BYTES * weights / cluster.at(rank).memory_bandwidth
    return SyncSeconds(beside, after)


def _add_rings(
    size_bytes: float, ranks: Sequence[int], rules: ParameterBytes, sums: list[_Ring], gathers: list[_Ring]
) -> None:
    sharing: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        sharing[sharing_node(rank, rules)].append(rank)
    if rules.zero == "none" or max(map(len, sharing.values())) == 1:
        sums.append(_Ring(size_bytes, 2, ranks))
        return
    weights = size_bytes / rules.summed * rules.weight if rules.summed else 0.0
    gathers += [_Ring(weights, 1, own) for own in sharing.values()]
    if len({*map(len, sharing.values())}) > 1:  # unequal parts: no sum part by part
        sums.append(_Ring(size_bytes, 2, ranks))
        return
    sums += [_Ring(size_bytes, 1, own) for own in sharing.values()]
    if len(sharing) > 1:
        part = size_bytes / len(sharing[sharing_node(ranks[0], rules)])
        sums += [_Ring(part, 2, alike) for alike in zip(*sharing.values(), strict=True)]


@lru_cache(maxsize=2)
def _places(
    ranks: tuple[int, ...], cluster: Cluster
) -> tuple[dict[int, Cluster], dict[int, tuple[int, int]]]:
    """Return by rank its group, and its node and port there; equal for all rank orders."""
    return dict(zip(ranks, map(cluster.at, ranks))), dict(zip(ranks, map(cluster.place_of, ranks)))


def _ring_seconds(rings: Iterable[_Ring], ranks: Sequence[int], cluster: Cluster) -> dict[int, float]:
    """Return seconds by rank until all its rings are done.

    Each ring passes `(n - 1) / n` of its bytes per round through each of its n members: over the links inside nodes,
    and in and out of each node once, spread over the ports of its members there. Small rings are latency-bound, with as
    many messages as the height of a tree. All rings run at the same time, so the loads of one port add up. The slowest
    device on a ring decides.
    """
    inside, waits = dict.fromkeys(ranks, 0.0), dict.fromkeys(ranks, 0.0)
    group_of, place_of = _places(tuple(ranks), cluster)
    homes = {place_of[rank][0]: group_of[rank] for rank in ranks}
    bandwidth = {node: group.port.bandwidth for node, group in homes.items()}
    through: dict[tuple[int, int], float] = defaultdict(float)  # (node, port) → seconds
    crossing: list[list[tuple[int, int]]] = []  # the ports of each ring between nodes
    used: dict[int, set[int]] = defaultdict(set)  # rank → those rings
    for ring in rings:
        count = len(ring.ranks)
        if count == 1:
            continue
        passed = ring.rounds * (count - 1) / count * ring.size_bytes
        ports: dict[int, set[int]] = defaultdict(set)
        for node, port in map(place_of.__getitem__, ring.ranks):
            ports[node].add(port)
        crosses = len(ports) > 1
        groups = {id(group_of[rank]): group_of[rank] for rank in ring.ranks}.values()
        latency = max((group.between if crosses else group.inside).latency for group in groups)
        wait = ring.rounds * math.ceil(math.log2(count)) * latency
        for rank in ring.ranks:
            waits[rank] += wait
            # A node's only member sends straight through the port.
            if count > len(ports):
                inside[rank] += passed / group_of[rank].inside.bandwidth
            if crosses:
                used[rank].add(len(crossing))
        if not crosses:
            continue
        for node, own in ports.items():
            for port in own:
                through[node, port] += passed / len(own) / bandwidth[node]
        crossing.append([(node, port) for node, own in ports.items() for port in own])
    slowest = [max(through[port] for port in ring) for ring in crossing]
    return {
        rank: waits[rank] + max(own, max((slowest[ring] for ring in used[rank]), default=0.0))
        for rank, own in inside.items()
    }


def least_sync(holders: int, tp: int, cluster: Cluster, rules: ParameterBytes) -> tuple[float, float]:
    """Return (rounds, bytes per second), whose quotient is a lower bound of the sync seconds per byte of gradients.
    It applies to sums that overlap the backward, for `holders` holders in stages of `tp` ranks, over any nodes."""
    rounds = 2 if rules.zero == "none" else 1
    link = cluster.between if holders * tp > cluster.gpus_per_node else cluster.inside
    return rounds * (holders - 1) / holders, link.bandwidth


def _groups(unit: UnitPlan, spec: UnitSpec, rules: ParameterBytes) -> Iterator[tuple[float, Sequence[int]]]:
    """Yield (bytes, ranks) of every gradient sum: per run of layers with equal holders, and per finest part.
    Parts are the finest division of the run by tensor parallelism, and of its experts by expert parallelism."""
    stages = [stage for replica in unit.replicas for stage in replica.stages]
    borders = sorted({layer for stage in stages for layer in (stage.first, stage.end)})
    for first, end in itertools.pairwise(borders):
        holders = [stage for stage in stages if stage.first <= first < stage.end]
        layers = [layer for layer in spec.layers[first:end] if layer.trainable]
        apart, parts = any(stage.ep > 1 for stage in holders), [stage.tp for stage in holders]
        finest = Degrees(max(parts))
        held = [
            (layer.held_beside_experts(finest) if apart else layer.held(finest)) * layer.trained_share
            for layer in layers
        ]
        sums = [(parts, held)]
        if apart:
            parts = [stage.ep if stage.ep > 1 else stage.tp for stage in holders]
            share = [layer.expert_parameters * layer.trained_share / max(parts) for layer in layers]
            sums.append((parts, share))
        for parts, held in sums:
            for part in range(max(parts)):
                ranks = [_holding(one.ranks, own, part, max(parts)) for one, own in zip(holders, parts)]
                yield rules.summed * sum(held), [*itertools.chain(*ranks)]


def _holding(ranks: Sequence[int], degree: int, part: int, parts: int) -> Sequence[int]:
    """Return the ranks of a stage that hold this one of `parts` parts, where every `degree` ranks divide the layers."""
    return ranks[part * degree // parts :: degree]
