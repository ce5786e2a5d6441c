"""A lower bound of a pipeline's step, independent of microbatches and order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.assignment.pipeline_shape import PipelineShape


def step_bound(shape: PipelineShape, seconds: NDArray[np.float64]) -> float:
    """Return a lower bound of the step's seconds, whatever the microbatches, order and depths.

    A stage does all its unit's work between the least work that must precede its first microbatch and the least that
    must follow its last; every sample passes all its stages forward and backward, one after another.
    """
    cost = np.where(seconds > 0, seconds + np.asarray(shape.fixed_seconds), 0.0)
    ratio = np.asarray(shape.backward)
    forward, backward = cost / (1 + ratio), cost * ratio / (1 + ratio)
    head, tail, path = (np.zeros((shape.num_units, len(seconds))) for _ in range(3))
    bound = 0.0
    for unit, count in enumerate(shape.stages):
        here = seconds[:, unit] > 0
        path[unit] += count * cost[:, unit]
        for target in shape.feeds[unit]:
            head[target] = np.maximum(head[target], head[unit] + count * forward[:, unit])
            tail[target] = np.maximum(tail[target], tail[unit] + count * backward[:, unit])
            path[target] = np.maximum(path[target], path[unit])
        if here.any():
            busy = seconds[:, unit].sum() + shape.fixed_seconds[unit]
            first = (head[unit] + (count - 1) * forward[:, unit])[here].min()
            last = (tail[unit] + (count - 1) * backward[:, unit])[here].min()
            bound = max(bound, float(path[unit].max()), float(first + busy + last))
    return bound
