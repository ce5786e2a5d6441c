"""How long ranks sum gradients after their last backward."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec, UnitSpec
from dilatant.plan.plan import Plan, Stage, UnitPlan


def sync_seconds(
    plan: Plan, model: ModelSpec, cluster: Cluster, rules: ParameterBytes = BF16
) -> dict[int, float]:
    """Seconds by rank for all-reduces of the gradients of its trainable layers among all holders of each.

    Holders are the context-parallel ranks of every replica of the layer. A ring passes `2 (n - 1) / n` of the bytes
    through each of its n members: over the links inside nodes, and in and out of each node once, spread over the ports
    of the members that are there. Small ones wait for as many messages as a tree is high. All ranks sum at the same
    time, so what several groups send through one port adds up.
    """
    inside, waits = dict.fromkeys(plan.ranks, 0.0), dict.fromkeys(plan.ranks, 0.0)
    through: dict[tuple[int, int], float] = defaultdict(float)  # bytes by node and port
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
            latency = cluster.between.latency if crosses else cluster.inside.latency
            for rank in ranks:
                waits[rank] += 2 * math.ceil(math.log2(count)) * latency
                # The only one of a node sends past its neighbours, straight through the port.
                if len(ranks) > len(ports):
                    inside[rank] += passed / cluster.inside.bandwidth
                if crosses:
                    used[rank].add(len(rings))
            if not crosses:
                continue
            for node, own in ports.items():
                for port in own:
                    through[node, port] += passed / len(own)
            rings.append([(node, port) for node, own in ports.items() for port in own])
    slowest = [max(through[port] for port in ring) / cluster.port.bandwidth for ring in rings]
    return {
        rank: waits[rank] + max(own, max((slowest[ring] for ring in used[rank]), default=0.0))
        for rank, own in inside.items()
    }


def _groups(unit: UnitPlan, spec: UnitSpec, rules: ParameterBytes) -> Iterator[tuple[float, Sequence[int]]]:
    """(bytes, ranks) of everything that is summed: by runs of layers with the same holders, and of these by the parts
    into which tensor parallelism divides them most finely."""
    stages = [stage for replica in unit.replicas for stage in replica.stages]
    borders = sorted({layer for stage in stages for layer in (stage.first, stage.end)})
    for first, end in itertools.pairwise(borders):
        holders = [stage for stage in stages if stage.first <= first < stage.end]
        finest = max(stage.tp for stage in holders)
        size_bytes = rules.gradient * sum(layer.held_trained(finest) for layer in spec.layers[first:end])
        for part in range(finest):
            yield size_bytes, [rank for stage in holders for rank in _holding(stage, part, finest)]


def _holding(stage: Stage, part: int, parts: int) -> tuple[int, ...]:
    """The ranks of a stage that hold this of so many parts of each layer; one for every context-parallel rank."""
    own = part * stage.tp // parts
    return stage.ranks[own :: stage.tp]
