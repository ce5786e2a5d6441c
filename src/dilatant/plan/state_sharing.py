"""Among how many ranks the optimizer's state of a layer is divided under a plan (ZeRO stage 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.memory import ParameterBytes
from dilatant.plan.model_spec import ModelSpec
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

    def node_of(rank: int) -> int:
        return 0 if rules.zero == "all" or rules.ranks_per_node is None else rank // rules.ranks_per_node

    divided = {unit.name: np.array([layer.divided for layer in unit.layers]) for unit in model.units}
    held: dict[tuple[str, int], NDArray[np.float64]] = {}
    for entry in placed:
        for rank in entry.stage.ranks:
            key = entry.unit, node_of(rank)
            own = slice(entry.stage.first, entry.stage.end)
            count = held.setdefault(key, np.zeros(len(divided[entry.unit])))
            count[own] += np.where(divided[entry.unit][own], 1.0 / entry.stage.tp, 1.0)
    return tuple(
        np.maximum(
            1.0,
            np.min(
                [
                    held[entry.unit, node][entry.stage.first : entry.stage.end]
                    for node in {node_of(rank) for rank in entry.stage.ranks}
                ],
                axis=0,
            ),
        )
        for entry in placed
    )
