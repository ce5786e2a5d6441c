"""Sharding of optimizer state (ZeRO stage 1): the number of ranks that divide each layer's state under a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.config.degrees import Degrees
from dilatant.cost.memory import ParameterBytes
from dilatant.plan.model_spec import LayerSpec, ModelSpec
from dilatant.plan.plan import PlacedStage, Plan


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
    nodes = [Counter(sharing_node(rank, rules) for rank in entry.stage.ranks) for entry in placed]
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


def sharing_node(rank: int, rules: ParameterBytes) -> int:
    """Return the number of the rank's sharding domain: its node, or 0 if all ranks shard together."""
    return 0 if rules.zero == "all" or rules.ranks_per_node is None else rank // rules.ranks_per_node


def parts_of_a_rank(layers: Sequence[LayerSpec], degrees: Degrees) -> NDArray[np.float64]:
    """Return the fraction of each layer that a rank holds, without experts and of experts: [2, layers]."""
    parts = [[layer.parts(degrees) for layer in layers], [layer.expert_parts(degrees) for layer in layers]]
    return 1.0 / np.array(parts, dtype=np.float64)


def ranks_together(
    layers: Sequence[LayerSpec],
    degrees: Degrees,
    beside: NDArray[np.float64],
    of_experts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return [layers]: the number of ranks that would divide all of a layer's state to the same size per rank, if
    `beside` ranks shard the state outside experts and `of_experts` ranks that of experts."""
    outer = np.array([layer.held_beside_experts(degrees) for layer in layers])
    inner = np.array([layer.held_of_experts(degrees) for layer in layers])
    share = outer / beside + inner / of_experts
    return np.where(inner == 0.0, beside, (outer + inner) / np.where(share == 0.0, 1.0, share))
