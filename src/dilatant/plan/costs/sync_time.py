"""Gradient sync time: the seconds in which ranks sum gradients, overlapping their last backward or exposed. It also has
the number of ranks that divide each layer's optimizer state under a plan (ZeRO stage 1)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.config.memory_modes import Shard
from dilatant.cost.analytic import BESIDE
from dilatant.cost.layer import trainable_before
from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import LayerSpec, ModelSpec, UnitSpec
from dilatant.plan.plan import PlacedStage, Plan, UnitPlan

UPDATE_BYTES = 50.0
"""Bytes per weight that an update moves: the gradient is read for its norm (4), scaled (8) and cleared (4), a fused
AdamW reads and writes gradient, moments and master (28), and the master is rounded (6)."""


HOP = 0.125
"""Latency from one rank of a ring to the next, as a share of a message's, in which ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class SyncSeconds:
    """Seconds by rank. beside: gradient sums that may overlap the last backward, bucket by bucket. after: updates, and
    gathers of updated weights where holders shard optimizer state; begins when every rank has its sums. updates: its
    part without the gathers."""

    beside: Mapping[int, float] = field(default_factory=dict)
    after: Mapping[int, float] = field(default_factory=dict)
    updates: Mapping[int, float] = field(default_factory=dict)

    def of(self, rank: int) -> float:
        """Return all sync seconds of a rank, without overlap."""
        return self.beside.get(rank, 0.0) + self.after.get(rank, 0.0)

    @property
    def longest(self) -> float:
        return max(map(self.of, {**self.beside, **self.after}), default=0.0)


@dataclass(frozen=True, slots=True)
class _Ring:
    """A ring collective, or as many as `count` with so many bytes together: all-reduce passes the bytes twice round the
    ring, reduce-scatter and all-gather once."""

    size_bytes: float
    rounds: int
    ranks: Sequence[int]
    count: int = 1


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
            domains = list(_by_domain(ranks, rules).values())
            for own in domains if rules.summed and rules.optimizer else ():
                part = size_bytes / rules.summed / (1 if rules.zero == "none" else len(own))
                for rank in own:
                    updated[rank] += part
            if len(ranks) > 1 and size_bytes:
                _add_rings(size_bytes, ranks, domains, rules, sums, gathers, rules.shard_of(unit.name))
    beside, after = (_ring_seconds(rings, plan.ranks, cluster) for rings in (sums, gathers))
    updates = {rank: UPDATE_BYTES * own / cluster.at(rank).memory_bandwidth for rank, own in updated.items()}
    for rank, seconds in updates.items():
        after[rank] += seconds
    return SyncSeconds(beside, after, updates)


def _add_rings(
    size_bytes: float,
    ranks: Sequence[int],
    domains: Sequence[Sequence[int]],
    rules: ParameterBytes,
    sums: list[_Ring],
    gathers: list[_Ring],
    shard: Shard,
) -> None:
    if rules.zero == "none" or max(map(len, domains)) == 1:
        sums.append(_Ring(size_bytes, 2, ranks))
        return
    weights = size_bytes / rules.summed * rules.weight if rules.summed else 0.0
    if not shard.startswith("weights"):  # those are gathered in actions
        gathers += [_Ring(weights, 1, own) for own in domains]
    if len({*map(len, domains)}) > 1:  # unequal parts: no sum part by part
        sums.append(_Ring(size_bytes, 2, ranks))
        return
    if shard == "none":  # others are summed in actions
        sums += [_Ring(size_bytes, 1, own) for own in domains]
    if len(domains) > 1:
        part = size_bytes / len(domains[0])
        sums += [_Ring(part, 2, alike) for alike in zip(*domains, strict=True)]


@dataclass(frozen=True, slots=True)
class _Places:
    """For each of some ranks: its index, its node, its port (numbered over all nodes), latency and bandwidth of its
    links inside and between nodes, and its wires if its node is a mesh, else 0."""

    index: Mapping[int, int]
    node: NDArray[np.int64]
    port: NDArray[np.int64]
    latency: NDArray[np.float64]
    bandwidth: NDArray[np.float64]
    wires: NDArray[np.int64]


@lru_cache(maxsize=2)  # equal for all rank orders
def _places(ranks: tuple[int, ...], cluster: Cluster) -> _Places:
    node, port = np.asarray([cluster.place_of(rank) for rank in ranks], dtype=np.int64).reshape(-1, 2).T
    links = [(group.inside, group.port) for group in map(cluster.at, ranks)]
    latency, bandwidth = (
        np.asarray([[getattr(link, name) for link in both] for both in links], dtype=np.float64).reshape(-1, 2).T
        for name in ("latency", "bandwidth")
    )
    index = {rank: number for number, rank in enumerate(ranks)}
    wires = np.asarray([max(0, inside.mesh - 1) for inside, _ in links], dtype=np.int64)
    return _Places(index, node, node * (int(port.max(initial=0)) + 1) + port, latency, bandwidth, wires)


def _ring_seconds(rings: Iterable[_Ring], ranks: Sequence[int], cluster: Cluster) -> dict[int, float]:
    """Return seconds by rank until all its rings are done.

    Each ring passes `(n - 1) / n` of its bytes per round through each of its n members: over the links inside nodes,
    and in and out of each node once, spread over the ports of its members there. Small rings are latency-bound, with as
    many messages as the height of a tree. All rings run at the same time, so the loads of one port add up. The slowest
    device on a ring decides.
    """
    several = [ring for ring in rings if len(ring.ranks) > 1]
    if not several:
        return dict.fromkeys(ranks, 0.0)
    places, devices = _places(tuple(ranks), cluster), len(ranks)
    count = np.asarray([len(ring.ranks) for ring in several])
    ring, first = np.repeat(np.arange(len(several)), count), np.cumsum(count) - count  # of every member
    member = np.asarray([places.index[rank] for one in several for rank in one.ranks])
    ports = int(places.port.max()) + 1
    codes, at = np.unique(ring * ports + places.port[member], return_index=True)  # each port of each ring
    owner, port = np.divmod(codes, ports)
    homes, on_node = np.unique(owner * ports + places.node[member[at]], return_inverse=True)
    nodes = np.bincount(homes // ports, minlength=len(several))
    crosses = nodes > 1
    rounds = np.asarray([one.rounds for one in several])
    passed = rounds * (count - 1) / count * np.asarray([one.size_bytes for one in several])
    latency = np.maximum.reduceat(places.latency[crosses[ring] * 1, member], first)
    heights = np.asarray([(own - 1).bit_length() for own in count.tolist()])
    visited = np.where(rounds == 1, HOP * (count - 1), 0.0)
    wait = np.asarray([one.count for one in several]) * np.maximum(rounds * heights, visited) * latency
    # A node's only member sends straight through the port.
    inside = np.where(count > nodes, passed, 0.0)[ring] / places.bandwidth[0, member]
    if places.wires.any():  # of a mesh, members of one ring use the wires to each other alone
        _, home, members = np.unique(ring * ports + places.node[member], return_inverse=True, return_counts=True)
        inside *= np.maximum(1.0, places.wires[member] / np.maximum(members[home] - 1, 1))
    load = passed[owner] / np.bincount(on_node)[on_node] / places.bandwidth[1, member[at]]
    through = np.bincount(port, np.where(crosses[owner], load, 0.0), ports)
    slowest = np.maximum.reduceat(through[port], np.searchsorted(owner, np.arange(len(several))))
    longest = np.bincount(member, inside, devices)
    np.maximum.at(longest, member, np.where(crosses, slowest, 0.0)[ring])
    return dict(zip(ranks, (np.bincount(member, wait[ring], devices) + longest).tolist(), strict=True))


def shard_seconds(
    plan: Plan, model: ModelSpec, cluster: Cluster, rules: ParameterBytes
) -> dict[int, tuple[float, ...]]:
    """Return stage number → seconds of the collectives of a stage whose gradients or weights are sharded (see
    `runtime.state.sharded_stage`). The first four are those of its actions F, B, I and W, the fifth that of the first F
    of a step alone, besides. The last is the share of them by which actions take longer: the first and the last are
    exposed, others slow what runs beside them."""
    found: dict[int, tuple[float, ...]] = {}
    for unit in plan.units:
        shard = rules.shard_of(unit.name)
        if "none" in (shard, rules.zero):
            continue
        for position, stage in enumerate(unit.replicas[0].stages):
            peers = [e for e in plan.stages() if (e.unit, e.position) == (unit.name, position)]
            spec, own = model.unit(unit.name), slice(stage.first, stage.end)
            layers = spec.layers[own]
            degrees, is_first = stage.degrees, stage.first == 0
            held = [layer.held_trained(degrees, is_first) for layer in layers]
            trained = sum(held)
            if shard.startswith("weights"):
                held = [size + layer.held_frozen(degrees, is_first) for size, layer in zip(held, layers)]
            if not sum(held):
                continue
            parts = ([rank for e in peers for rank in e.stage.ranks[part :: stage.tp]] for part in range(stage.tp))
            domains = [own for ranks in parts for own in _by_domain(ranks, rules).values()]
            rings = [(ranks, len(layers)) for ranks in domains]
            blocks = [size for size, layer in zip(held, layers) if "layers." in layer.name]
            exposed = (sum(held) - sum(blocks) + max(blocks, default=0.0)) / sum(held)
            before = trainable_before(spec.trainable, model.upstream_trainable(unit.name))[own]
            again = sum(  # blocks without a backward are not gathered for one
                size
                for size, layer, earlier in zip(held, layers, before)
                if earlier or layer.trainable or "layers." not in layer.name
            )
            weight = rules.weight * shard.startswith("weights")
            gather, backward, total = (
                max(_ring_seconds([_Ring(size, 1, *one) for one in rings], plan.ranks, cluster).values())
                if size
                else 0.0
                for size in (sum(held) * weight, again * weight, trained * rules.gradient)
            )
            once = 0.0
            if shard == "weights_by_step":
                once, gather, backward = gather, 0.0, 0.0
            if max(map(len, domains)) > 1:
                seconds = (gather, backward + total, backward, total, once, exposed + BESIDE * (1.0 - exposed))
                found |= {entry.index: seconds for entry in peers}
    return found


def least_sync(holders: int, tp: int, cluster: Cluster, rules: ParameterBytes) -> tuple[float, float]:
    """Return (rounds, bytes per second), whose quotient is a lower bound of the sync seconds per byte of gradients.
    It applies to sums that overlap the backward, for `holders` holders in stages of `tp` ranks, over any nodes."""
    rounds = 2 if rules.zero == "none" else 1
    ports = cluster.between.bandwidth * cluster.reach / cluster.gpus_per_node
    bandwidth = ports if holders * tp > cluster.reach else cluster.inside.bandwidth
    return rounds * (holders - 1) / holders, bandwidth


def _groups(unit: UnitPlan, spec: UnitSpec, rules: ParameterBytes) -> Iterator[tuple[float, Sequence[int]]]:
    """Yield (bytes, ranks) of every gradient sum: per run of layers with equal holders, and per finest part.
    Parts are the finest division of the run by tensor parallelism, and of its experts by expert parallelism. Holders of
    both ends of a unit hold its tied weight once."""
    stages = [stage for replica in unit.replicas for stage in replica.stages]
    borders = sorted({layer for stage in stages for layer in (stage.first, stage.end)})
    for first, end in itertools.pairwise(borders):
        holders = [stage for stage in stages if stage.first <= first < stage.end]
        layers = [layer for layer in spec.layers[first:end] if layer.trainable]
        apart, parts = any(stage.ep > 1 for stage in holders), [stage.tp for stage in holders]
        finest, both = Degrees(max(parts)), all(stage.first == 0 for stage in holders)
        held = [
            ((layer.held_beside_experts(finest) if apart else layer.held(finest)) - layer.held_before(finest) * both)
            * layer.trained_share
            for layer in layers
        ]
        sums = [(parts, held)]
        if apart:
            parts = [stage.ep if stage.ep > 1 else stage.tp for stage in holders]
            share = [layer.expert_parameters * layer.trained_share / max(parts) for layer in layers]
            sums.append((parts, share))
        for parts, held in sums:
            for part in range(max(parts)):
                # Of a stage, every `own` ranks divide the layers.
                ranks = [stage.ranks[part * own // max(parts) :: own] for stage, own in zip(holders, parts)]
                yield rules.summed * sum(held), [*itertools.chain(*ranks)]


def sharing(plan: Plan, model: ModelSpec, rules: ParameterBytes) -> tuple[NDArray[np.float64], ...]:
    """Return for every stage of `plan.stages()` [layers]: the number of ranks that shard the state of its ranks.

    The minimum over the stage's ranks is used. Holders are weighted by the part that they hold: two ranks with half a
    layer each are one, two ranks with all of an undivided layer are two.
    """
    placed = plan.stages()
    if rules.zero == "none":
        return tuple(np.ones(entry.stage.end - entry.stage.first) for entry in placed)

    # Caches: equal stages of other replicas mostly share results.
    parts: dict[tuple[object, ...], NDArray[np.float64]] = {}
    together: dict[tuple[object, ...], NDArray[np.float64]] = {}
    held: dict[tuple[str, int], NDArray[np.float64]] = {}  # by layer: row 0 without experts, row 1 experts
    nodes = [{node: len(own) for node, own in _by_domain(entry.stage.ranks, rules).items()} for entry in placed]
    for entry, by_node in zip(placed, nodes):
        stage, layers = entry.stage, model.unit(entry.unit).layers
        key = _alike(entry)
        if key not in parts:
            parts[key] = parts_of_a_rank(layers[stage.first : stage.end], stage.degrees)
        for node, count in by_node.items():
            on_node = held.setdefault((entry.unit, node), np.zeros((2, len(layers))))
            on_node[:, stage.first : stage.end] += count * parts[key]
    result = []
    for entry, by_node in zip(placed, nodes):
        stage = entry.stage
        least = np.min([held[entry.unit, node][:, stage.first : stage.end] for node in by_node], axis=0)
        key = *_alike(entry), least.tobytes()
        if key not in together:
            own = model.unit(entry.unit).layers[stage.first : stage.end]
            together[key] = ranks_together(own, stage.degrees, *np.maximum(1.0, least))
        result.append(together[key])
    return tuple(result)


def _alike(entry: PlacedStage) -> tuple[object, ...]:
    """Return a key that is equal for the same stage of other replicas."""
    stage = entry.stage
    return entry.unit, stage.first, stage.end, stage.degrees


def _by_domain(ranks: Sequence[int], rules: ParameterBytes) -> Mapping[int, Sequence[int]]:
    """Return the ranks of each sharding domain, by its number: a node, or 0 if all ranks shard together."""
    if rules.zero == "all" or rules.ranks_per_node is None:
        return {0: ranks}
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[rank // rules.ranks_per_node].append(rank)
    return found


def parts_of_a_rank(layers: Sequence[LayerSpec], degrees: Degrees) -> NDArray[np.float64]:
    """Return the fraction of each layer that a rank holds, without experts and of experts: [2, layers]."""
    parts = [[layer.parts(degrees) for layer in layers], [layer.expert_parts(degrees) for layer in layers]]
    return 1.0 / np.array(parts, dtype=np.float64)


def ranks_together(
    layers: Sequence[LayerSpec], degrees: Degrees, beside: NDArray[np.float64], of_experts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [layers]: the number of ranks that would divide all of a layer's state to the same size per rank. `beside`
    ranks shard the state outside experts and `of_experts` ranks that of experts."""
    outer = np.array([layer.held_beside_experts(degrees) for layer in layers])
    inner = np.array([layer.held_of_experts(degrees) for layer in layers])
    share = outer / beside + inner / of_experts
    return np.where(inner == 0.0, beside, (outer + inner) / np.where(share == 0.0, 1.0, share))
