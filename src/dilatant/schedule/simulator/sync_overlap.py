"""Gradient-sync overlap: when gradient sums finish if buckets are sent during the last backward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.costs.step_costs import StepCosts
from dilatant.schedule.packed import WEIGHT_GRADIENT
from dilatant.schedule.simulator.graph import ScheduleGraph
from dilatant.schedule.simulator.predict import ends_of_backward


def synced_seconds(
    graph: ScheduleGraph, costs: StepCosts, durations: NDArray[np.float64], ends: NDArray[np.float64]
) -> float:
    """Return the seconds from the start of a step until every rank has its summed gradients and all updated weights; 0
    if nothing is summed. `durations`, `ends`: [ops].

    A rank sums gradients in the order in which they are complete: spread evenly over a stage's last backward, or all
    after it if it is split. The last bucket is sent when the backward is over. A rank's sync seconds are divided among
    its stages in proportion to their gradients.
    """
    last = ends_of_backward(graph)[1]
    if not len(last):
        return 0.0
    stage_of = graph.stage[last]
    end = ends[last]
    begin = np.where(graph.kind[last] == WEIGHT_GRADIENT, end, end - durations[last])
    held = np.maximum(costs.stages.gradient_bytes[stage_of], 1.0)
    counts = [len(graph.arrays.placed[stage].stage.ranks) for stage in stage_of.tolist()]
    pair = np.repeat(np.arange(len(last)), counts)  # one per (stage, rank)
    rank = np.concatenate([graph.arrays.placed[stage].stage.ranks for stage in stage_of.tolist()])
    beside, after = (
        np.asarray([seconds.get(one, 0.0) for one in rank.tolist()])
        for seconds in (costs.sync.beside, costs.sync.after)
    )
    order = np.lexsort((end[pair], rank))
    pair, rank, beside = pair[order], rank[order], beside[order]
    firsts = np.flatnonzero(np.diff(rank, prepend=rank[0] - 1))
    of_rank = np.add.reduceat(held[pair], firsts)
    sizes = np.diff(np.append(firsts, len(rank)))
    own = beside * held[pair] / np.repeat(of_rank, sizes)
    until = np.cumsum(own)
    behind = (
        np.repeat(until[np.append(firsts[1:], len(rank)) - 1], sizes) - until
    )  # of the rank's later stages
    buckets = np.ceil(held[pair] / BUCKET_BYTES)
    first = begin[pair] + (end - begin)[pair] / buckets
    sums = np.maximum(first + own, end[pair] + own / buckets) + behind
    return float(sums.max() + after.max())
