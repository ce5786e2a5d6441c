"""Among how many ranks the optimizer's state of a layer is divided under a plan (ZeRO stage 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import ParameterBytes
from dilatant.plan.model_spec import LayerSpec, ModelSpec
from dilatant.plan.plan import Plan


def sharing(plan: Plan, model: ModelSpec, rules: ParameterBytes) -> tuple[NDArray[np.float64], ...]:
    """For every stage of `plan.stages()`: [its layers], the ranks that divide the state of what one of its ranks holds;
    of the rank with the fewest.

    Holders of unlike tensor parallelism count by the part that they hold: two ranks with a half each are one more, two
    with all of a layer that is not divided are two.
    """
    placed = plan.stages()
    if rules.zero == "none":
        return tuple(np.ones(entry.stage.end - entry.stage.first) for entry in placed)

    held: dict[tuple[str, int], NDArray[np.float64]] = {}  # by layer, beside experts and of experts
    for entry in placed:
        stage, layers = entry.stage, model.unit(entry.unit).layers
        parts = parts_of_a_rank(layers[stage.first : stage.end], stage.tp, stage.ep)
        for rank in stage.ranks:
            count = held.setdefault((entry.unit, sharing_node(rank, rules)), np.zeros((2, len(layers))))
            count[:, stage.first : stage.end] += parts
    result = []
    for entry in placed:
        stage = entry.stage
        nodes = {sharing_node(rank, rules) for rank in stage.ranks}
        least = np.min([held[entry.unit, node][:, stage.first : stage.end] for node in nodes], axis=0)
        own = model.unit(entry.unit).layers[stage.first : stage.end]
        result.append(ranks_together(own, stage.tp, stage.ep, *np.maximum(1.0, least)))
    return tuple(result)


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
