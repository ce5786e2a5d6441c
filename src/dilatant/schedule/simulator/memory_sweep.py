"""Memory sweep: the bytes that every rank holds over the time of a timeline, and the peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.simulator.graph import ScheduleGraph


@dataclass(frozen=True, slots=True, eq=False)
class StepBytes:
    """Bytes per rank of a step. `static` is `[stages]`, held throughout; the rest is by op, `[ops]`, or by message.

    An op takes `allocate` when it starts and frees `release` when it ends (a negative value takes more); `transient` is
    held only while it runs. `message` is held by the sender from the end of the producing op until it has arrived, and
    by the receiver from then until the consuming op starts (which counts it among its activations).
    """

    static: NDArray[np.float64]
    allocate: NDArray[np.float64]
    release: NDArray[np.float64]
    transient: NDArray[np.float64]
    message: NDArray[np.float64]


def peak_bytes(
    graph: ScheduleGraph,
    size: StepBytes,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    arrival: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the peak bytes of each rank: `[ranks]`, in the schedule's rank order.

    At equal times, releases are applied before allocations.
    """
    from dilatant.schedule.rank_kernels import peak_by_rank

    packed = graph.packed
    num_ranks = len(packed.ranks)
    index = {rank: number for number, rank in enumerate(packed.ranks)}
    members = [
        [index[rank] for rank in placed.stage.ranks if rank in index] for placed in graph.arrays.placed
    ]
    whole, groups = members, {tuple(held_by) for held_by in members}
    if sum(map(len, groups)) == len({rank for held_by in groups for rank in held_by}):
        # Every rank is in one group; all ranks of a group hold the same bytes as its first.
        members = [held_by[:1] for held_by in whole]
    row_rank = np.repeat(np.arange(num_ranks), np.diff(packed.offsets))
    op = graph.row_op
    source, target = graph.messages
    arrived = arrival[: graph.num_messages]
    sent, sender = _spread(graph.stage[source], members)
    taken, receiver = _spread(graph.stage[target], members)
    lead = np.isin(row_rank, [rank for held_by in members for rank in held_by])
    row_rank, op = row_rank[lead], op[lead]
    ranks = np.concatenate([row_rank, row_rank, sender, sender, receiver, receiver])
    times = np.concatenate(
        [start[op], end[op], end[source[sent]], arrived[sent], arrived[taken], start[target[taken]]]
    )
    deltas = np.concatenate(
        [
            size.allocate[op] + size.transient[op],
            -size.release[op] - size.transient[op],
            size.message[sent],
            -size.message[sent],
            size.message[taken],
            -size.message[taken],
        ]
    )
    peak = peak_by_rank(ranks, times, deltas, num_ranks)
    for first, held_by in zip(members, whole):
        if len(first) < len(held_by):
            peak[held_by] = peak[first]
    for stage, held_by in enumerate(whole):
        peak[held_by] += size.static[stage]
    return peak


def _spread(
    stage: NDArray[np.int32], members: list[list[int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Repeat every item on a stage once for each rank of the stage: item numbers and rank numbers."""
    counts = np.asarray([len(held_by) for held_by in members])
    flat = np.asarray([rank for held_by in members for rank in held_by], dtype=np.int64)
    first = np.cumsum(counts) - counts
    item = np.repeat(np.arange(len(stage)), counts[stage])
    nth = np.arange(len(item)) - np.repeat(np.cumsum(counts[stage]) - counts[stage], counts[stage])
    return item, flat[first[stage[item]] + nth]
