"""Lower bounds on a step's seconds for every schedule family, from one simulated schedule of the same pieces."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.packed import BACKWARD, FORWARD, WEIGHT_GRADIENT
from dilatant.schedule.simulator.predict import TimedStep


def least_seconds(step: TimedStep) -> tuple[float, float]:
    """Return lower bounds of the seconds until all gradients are summed: with whole backwards, and with split ones.

    The second is infinite if splitting cannot help: no rank waits for another, or there are no weight gradients. A rank
    begins no earlier than the first rows can reach it, then does all of its work. If all of its stages have a backward,
    its last action is a backward: after a whole one the gradient must still travel to the first stage, after split ones
    the rank must still sum its gradients.
    """
    from dilatant.schedule.simulator.bound_kernels import seconds_after, seconds_before

    graph, costs = step.graph, step.costs
    edges = graph.order, graph.offsets, graph.source, graph.edge, graph.num_messages
    ops = graph.row_op
    kind = graph.kind[ops]
    before, after = seconds_before(*edges, step.durations)[ops], seconds_after(*edges, step.durations)[ops]
    backward = np.zeros(len(graph.arrays.placed), dtype=bool)
    backward[graph.stage[graph.kind == BACKWARD]] = True
    after = np.where(kind == BACKWARD, after, np.where(backward[graph.stage[ops]], math.inf, 0.0))
    offsets = graph.packed.offsets
    some = np.flatnonzero(np.diff(offsets))
    firsts = offsets[some]
    until = np.minimum.reduceat(np.where(kind == FORWARD, before, math.inf), firsts)
    until += np.add.reduceat(step.durations[ops], firsts)
    whole = float((until + np.minimum.reduceat(after, firsts)).max(initial=0.0))
    if not costs.stages.seconds[:, WEIGHT_GRADIENT].any() or not _waits(step):
        return whole, math.inf
    return whole, float((until + _alone_sums(step)[some]).max(initial=0.0))


def _alone_sums(step: TimedStep) -> NDArray[np.float64]:
    """Return the gradient-sync seconds of each rank with exactly one stage, if that stage trains; else 0: [ranks]."""
    ranks = step.graph.packed.ranks
    stages: dict[int, list[int]] = {rank: [] for rank in ranks}
    for placed in step.graph.arrays.placed:
        for rank in placed.stage.ranks:
            stages[rank].append(placed.index)
    held = step.costs.stages.gradient_bytes
    return np.array(
        [
            step.costs.sync.beside.get(rank, 0.0) if len(own) == 1 and held[own[0]] > 0 else 0.0
            for rank, own in stages.items()
        ]
    )


def _waits(step: TimedStep) -> bool:
    """Return whether any rank waits for another."""
    graph = step.graph
    lead = graph.arrays.lead[graph.stage]
    source, target = graph.edge_source[: graph.num_messages], graph.edge_target[: graph.num_messages]
    return bool((lead[source] != lead[target]).any())
