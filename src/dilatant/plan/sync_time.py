"""How long ranks sum gradients after their last backward."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, UnitPlan


def sync_seconds(
    plan: Plan, model: ModelSpec, cluster: Cluster, rules: ParameterBytes = BF16
) -> dict[int, float]:
    """Seconds by rank for all-reduces of the gradients of its trainable layers among all holders of each.

    Holders are the context-parallel ranks of every replica of the layer. A ring passes `2 (n - 1) / n` of the bytes
    through each of its n members: over the links inside nodes, and in and out of each node once, spread over the ports
    of the members that are there. Small ones wait for as many messages as a tree is high. All ranks sum at the same
    time, so what several groups send through one port adds up. Of unlike devices the slowest on a ring decides.
    """
    inside, waits = dict.fromkeys(plan.ranks, 0.0), dict.fromkeys(plan.ranks, 0.0)
    through: dict[tuple[int, int], float] = defaultdict(float)  # seconds by node and port
    rings: list[list[tuple[int, int]]] = []  # the ports of each group between nodes
    used: dict[int, set[int]] = defaultdict(set)  # groups by rank
    for unit in plan.units:
        for size_bytes, ranks in _groups(unit, model.unit(unit.name), rules):
            count = len(ranks)
            if count == 1 or not size_bytes:
                continue
            passed = 2 * (count - 1) / count * size_bytes
            ports: dict[int, set[int]] = defaultdict(set)
            for rank in ranks:
                ports[cluster.node_of(rank)].add(cluster.port_of(rank))
            crosses = len(ports) > 1
            own_groups = [cluster.at(rank) for rank in ranks] if cluster.parts else [cluster]
            latency = max((group.between if crosses else group.inside).latency for group in own_groups)
            for rank in ranks:
                waits[rank] += 2 * math.ceil(math.log2(count)) * latency
                # The only one of a node sends past its neighbours, straight through the port.
                if len(ranks) > len(ports):
                    inside[rank] += passed / cluster.at(rank).inside.bandwidth
                if crosses:
                    used[rank].add(len(rings))
            if not crosses:
                continue
            for node, own in ports.items():
                bandwidth = cluster.at(cluster.ranks_of(node)[0]).port.bandwidth
                for port in own:
                    through[node, port] += passed / len(own) / bandwidth
            rings.append([(node, port) for node, own in ports.items() for port in own])
    slowest = [max(through[port] for port in ring) for ring in rings]
    return {
        rank: waits[rank] + max(own, max((slowest[ring] for ring in used[rank]), default=0.0))
        for rank, own in inside.items()
    }


def _groups(unit: UnitPlan, spec: UnitSpec, rules: ParameterBytes) -> Iterator[tuple[float, Sequence[int]]]:
    """(bytes, ranks) of everything that is summed: by runs of layers with the same holders, and of these by the parts
    into which tensor parallelism, and of experts expert parallelism, divides them most finely."""
    stages = [stage for replica in unit.replicas for stage in replica.stages]
    borders = sorted({layer for stage in stages for layer in (stage.first, stage.end)})
    for first, end in itertools.pairwise(borders):
        holders = [stage for stage in stages if stage.first <= first < stage.end]
        finest = max(stage.tp for stage in holders)
        layers = [layer for layer in spec.layers[first:end] if layer.trainable]
        apart = any(stage.ep > 1 for stage in holders)
        held = [
            (layer.held_beside_experts(finest) if apart else layer.held(finest)) * layer.trained_share
            for layer in layers
        ]
        for part in range(finest):
            yield (
                rules.gradient * sum(held),
                [rank for stage in holders for rank in _holding(stage.ranks, stage.tp, part, finest)],
            )
        if not apart:
            continue
        degrees = [stage.ep if stage.ep > 1 else stage.tp for stage in holders]
        finest = max(degrees)
        for part in range(finest):
            yield (
                rules.gradient
                * sum(layer.expert_parameters * layer.trained_share / finest for layer in layers),
                [
                    rank
                    for stage, degree in zip(holders, degrees)
                    for rank in _holding(stage.ranks, degree, part, finest)
                ],
            )


def _holding(ranks: Sequence[int], degree: int, part: int, parts: int) -> Sequence[int]:
    """Of ranks of a stage of which each `degree` divide its layers, or its experts, those that hold this of so many
    parts."""
    return ranks[part * degree // parts :: degree]
