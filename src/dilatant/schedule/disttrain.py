"""DistTrain's reordering: samples over data-parallel groups, and microbatches over the step.

Both algorithms with the repairs that the paper's printed versions need (planning notes D1-D4): samples are sorted
descending, groups come back as group numbers, and the first interval is estimated, as what happens downstream of the
first microbatch, instead of read off an order that does not exist yet.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.depth import path_depths
from dilatant.schedule.joint_search import order_search
from dilatant.schedule.pipeline_shape import PipelineShape, op_shares, shape_graph, shared
from dilatant.schedule.simulate import op_ends


def intra_reorder(
    size: NDArray[np.float64], num_groups: int, cardinality: int | None = None
) -> NDArray[np.int64]:
    """The group of every sample: `[samples]`, by longest-processing-time-first (Alg. 2, sorted descending, D1).

    `size` is a sample's seconds. Groups are returned by number, since groups of unequal size cannot be cut out of a
    concatenation again (D2); `cardinality` caps the samples of a group instead, for loaders that need equal counts.
    Raises ValueError when the cap leaves samples without a group.
    """
    from dilatant.schedule import assign_kernels as kernels

    if cardinality is not None and cardinality * num_groups < len(size):
        raise ValueError(f"{num_groups} groups of at most {cardinality} cannot hold {len(size)} samples")
    room = np.full(num_groups, float(len(size) if cardinality is None else cardinality))
    group = np.empty(len(size), dtype=np.int64)
    order = np.argsort(-size, kind="stable")
    kernels.place_units(order, size[None], np.ones(num_groups), np.ones(len(size)), room, group)
    return group


def inter_reorder(shape: PipelineShape, load: NDArray[np.float64]) -> NDArray[np.int64]:
    """The execution order of microbatches: `[microbatches]` numbers (Alg. 3, for 1F1B whatever the shape's depths).

    `load [units, microbatches]` are seconds per stage. Smallest first, the p - 1 smallest last, and in between the
    microbatches whose forward best fills each interval between two backwards of the first stage; the interval is
    simulated with every unit's real forward and backward (D5, D9) from the microbatches placed so far. The first
    interval takes p - 1 of them, so that l - 2p + 2 intervals are filled (D3). With l < 2p - 1 microbatches there is
    nothing in between, and the order is searched directly.
    """
    count = load.shape[1]
    plan = shape.plan()
    shape = replace(shape, depths=path_depths(plan), family=None, ranks=None)
    root = next(unit for unit in range(shape.num_units) if all(unit not in feeds for feeds in shape.feeds))
    depth = shape.depths[sum(shape.stages[:root])] if shape.depths else 1
    if count < 2 * depth - 1:
        return order_search(shape, load, evaluations=2000, seed=0)
    size = np.asarray(shape.stages) @ load
    left = [int(number) for number in np.argsort(size, kind="stable")]
    first, rear, left = left[0], left[1:depth], left[depth:]
    placed = [first]

    ratio = np.asarray(shape.backward)
    forward = load[root] / (1 + ratio[root])
    downstream = size - load[root]
    # The first interval: all that microbatch 1 has still to do beyond the first stage.
    width = depth - 1
    if width and left:
        ascending = sorted(left, key=lambda number: (forward[number], number))
        sums = np.convolve(forward[ascending], np.ones(width), "valid")
        at = int(np.argmin(np.abs(sums - downstream[first])))
        chosen = ascending[at : at + width]
        placed += chosen
        left = [number for number in left if number not in set(chosen)]

    graph = shape_graph(shape, shared([(slot,) for slot in range(count)], shape.num_units))
    unit, share = op_shares(shape, graph)
    slot = graph.packed.pieces.microbatch[graph.piece]
    stage = int(graph.arrays.stages_of[root, 0])
    backward_op = np.full(count, -1)
    mine = (graph.stage == stage) & (graph.kind == 1)
    backward_op[slot[mine]] = np.flatnonzero(mine)
    cost = np.zeros((shape.num_units, count))
    cost[:, : len(placed)] = load[:, placed]
    interval = 1
    while left:
        end = op_ends(graph, cost[unit, slot] * share)
        volume = _idle_before(backward_op, end, cost, share, root, interval) if ratio[root] else 0.0
        best = min(left, key=lambda number: (abs(forward[number] - volume), number))
        cost[:, len(placed)] = load[:, best]
        placed.append(best)
        left.remove(best)
        interval += 1
    return np.asarray([*placed, *rear], dtype=np.int64)


def _idle_before(
    backward_op: NDArray[np.int64],
    end: NDArray[np.float64],
    cost: NDArray[np.float64],
    share: NDArray[np.float64],
    root: int,
    interval: int,
) -> float:
    """Seconds between two neighbouring backwards of the first stage, its forward in between still unknown."""
    this, previous = backward_op[interval], backward_op[interval - 1]
    start = end[this] - cost[root, interval] * share[this]
    return float(start - end[previous])
