"""How long ranks sum gradients after their last backward."""

from __future__ import annotations

from dilatant.cost.memory import BF16, ParameterBytes
from dilatant.plan.cluster import Cluster
from dilatant.plan.model_spec import ModelSpec
from dilatant.plan.plan import Plan


def sync_seconds(
    plan: Plan, model: ModelSpec, cluster: Cluster, rules: ParameterBytes = BF16
) -> dict[int, float]:
    """Seconds by rank for a ring all-reduce of the gradients of its trainable layers among all their holders.

    Holders are the context-parallel ranks of every replica of the layer. A group inside one node runs at the node's
    links; across nodes all devices of a node share its way out.
    """
    seconds = dict.fromkeys(plan.ranks, 0.0)
    for unit in plan.units:
        spec = model.unit(unit.name)
        stage_of = [
            {layer: stage for stage in replica.stages for layer in range(stage.first, stage.end)}
            for replica in unit.replicas
        ]
        for replica in unit.replicas:
            for stage in replica.stages:
                for layer in range(stage.first, stage.end):
                    if not spec.layers[layer].trainable:
                        continue
                    holders = [holding[layer] for holding in stage_of]
                    size = sum(holder.cp for holder in holders)
                    if size == 1:
                        continue
                    nodes = {cluster.node_of(rank) for holder in holders for rank in holder.ranks}
                    if len(nodes) == 1:
                        bandwidth = cluster.inside.bandwidth
                    else:
                        bandwidth = cluster.between.bandwidth / cluster.gpus_per_node
                    size_bytes = rules.gradient * spec.layers[layer].held(stage.tp)
                    for rank in stage.ranks:
                        seconds[rank] += 2 * (size - 1) / size * size_bytes / bandwidth
    return seconds
