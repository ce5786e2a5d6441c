"""Among how many ranks the optimizer's state of a layer is divided under a plan (ZeRO stage 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import ParameterBytes
from dilatant.plan.model_spec import LayerSpec, ModelSpec
from dilatant.plan.plan import PlacedStage, Plan


def sharing(plan: Plan, model: ModelSpec, rules: ParameterBytes) -> tuple[NDArray[np.float64], ...]:
    """For every stage of `plan.stages()`: [its layers], the ranks that divide the state of what one of its ranks holds;
    of the rank with the fewest.

    Holders of unlike tensor parallelism count by the part that they hold: two ranks with a half each are one more, two
    with all of a layer that is not divided are two.
    """
    placed = plan.stages()
    if rules.zero == "none":
        return tuple(np.ones(entry.stage.end - entry.stage.first) for entry in placed)

    # Mostly the same stage of other replicas, with as many others on its nodes.
    parts: dict[tuple[object, ...], NDArray[np.float64]] = {}
    together: dict[tuple[object, ...], NDArray[np.float64]] = {}
    held: dict[tuple[str, int], NDArray[np.float64]] = {}  # by layer, beside experts and of experts
    nodes = [Counter(sharing_node(rank, rules) for rank in entry.stage.ranks) for entry in placed]
    for entry, by_node in zip(placed, nodes):
        stage, layers = entry.stage, model.unit(entry.unit).layers
        key = _alike(entry)
        if key not in parts:
            parts[key] = parts_of_a_rank(layers[stage.first : stage.end], stage.tp, stage.ep)
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
            together[key] = ranks_together(own, stage.tp, stage.ep, *np.maximum(1.0, least))
        result.append(together[key])
    return tuple(result)


def _alike(entry: PlacedStage) -> tuple[object, ...]:
    """The same for the same stage of other replicas."""
    stage = entry.stage
    return entry.unit, stage.first, stage.end, stage.tp, stage.ep


def sharing_node(rank: int, rules: ParameterBytes) -> int:
    """The number of those among whom this rank may share state: of its node, or 0 for all."""
    return 0 if rules.zero == "all" or rules.ranks_per_node is None else rank // rules.ranks_per_node


def parts_of_a_rank(layers: Sequence[LayerSpec], tp: int, ep: int) -> NDArray[np.float64]:
    """What a rank holds of each layer beside experts, and of its experts, as a part of all: [2, layers]."""
    beside = np.array([1.0 / tp if layer.divided else 1.0 for layer in layers])
    return np.stack([beside, beside if ep == 1 else np.full(len(layers), 1.0 / ep)])


def ranks_together(
    layers: Sequence[LayerSpec],
    tp: int,
    ep: int,
    beside: NDArray[np.float64],
    of_experts: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[layers]: the number of ranks that would leave as much of a layer's state to each if they shared all of it, where
    so many share what is beside experts, and so many what is of experts."""
    outer = np.array([layer.held_beside_experts(tp) for layer in layers])
    inner = np.array([layer.held_of_experts(tp, ep) for layer in layers])
    share = outer / beside + inner / of_experts
    return np.where(inner == 0.0, beside, (outer + inner) / np.where(share == 0.0, 1.0, share))
