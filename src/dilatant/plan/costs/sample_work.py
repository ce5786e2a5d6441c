"""Sample work: device seconds of each sample in each unit, the input of device allocation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dilatant.cost.model import CostModel
from dilatant.plan.costs.stage_costs import layer_table
from dilatant.plan.costs.workload import Workload
from dilatant.plan.model_spec import ModelSpec


def sample_work(model: ModelSpec, costs: CostModel, workload: Workload) -> NDArray[np.float64]:
    """Return [samples, units] device seconds of forward plus backward under the frozen rule, units in model order.

    The seconds are those at the smallest (tp, cp) with costs for the unit, times its devices, as `minimum_stable_batch`
    expects. Raises UserError for layer types without costs.
    """
    columns = []
    for unit in model.units:
        degrees = set.intersection(*(set(costs.layers.get(layer.kind, {})) for layer in unit.layers))
        tp, cp = min(degrees, key=lambda degree: (degree[0] * degree[1], degree), default=(1, 1))
        table = layer_table(unit, model.upstream_trainable(unit.name), costs, tp, cp)
        square, linear, constant = (table.seconds[:, 0] + table.seconds[:, 1]).sum(axis=0) * tp * cp
        tokens = np.asarray(workload.tokens[unit.name], dtype=np.float64)
        squares = np.asarray(workload.squares.get(unit.name, tokens**2), dtype=np.float64)
        columns.append(np.where(tokens > 0, square * squares + linear * tokens + constant, 0.0))
    return np.stack(columns, axis=1)
