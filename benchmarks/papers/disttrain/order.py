"""DistTrain's order of microbatches (Alg. 3, and its variant for interleaved 1F1B, 6.2), as a microbatch policy.

It contains a repair that the printed version needs: the first interval is estimated from the first microbatch's work
downstream, because the order from which the paper reads it does not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.assignment import assign_kernels as kernels
from dilatant.schedule.assignment.assign import random_slots
from dilatant.schedule.assignment.joint_search import START_THRESHOLD, step_model
from dilatant.schedule.assignment.pipeline_shape import (
    ByUnit,
    MicrobatchProblem,
    PipelineShape,
    op_shares,
    shape_graph,
    shape_seconds,
    shared,
)
from dilatant.schedule.families.families import interleaved, one_f_one_b, path_depths
from dilatant.schedule.packed import BACKWARD
from dilatant.schedule.simulator.graph import ScheduleGraph
from dilatant.schedule.simulator.simulate import op_ends


def disttrain(problem: MicrobatchProblem) -> ByUnit:
    """Return random groups, reordered if that shortens the simulated step. No order is always the best for interleaved
    pipelines, so the order for 1F1B with the same number of stages is tried, too."""
    shape, slot_of = problem.shape, random_slots(problem)
    count = problem.num_microbatches
    loads = np.stack([np.bincount(slot_of, column, count) for column in problem.seconds.T])
    found = [slot_of]
    goes_round = shape.ranks is not None and any(
        len({*ranks}) < len(ranks) for ranks in np.split(np.array(shape.ranks), np.cumsum(shape.stages)[:-1])
    )
    for interleave in (False, True) if shape.family is interleaved and goes_round else (False,):
        found.append(np.argsort(inter_reorder(shape, loads, interleave))[slot_of])

    def batches(slots: NDArray[np.int64]) -> ByUnit:
        groups = [tuple(np.flatnonzero(slots == slot).tolist()) for slot in range(count)]
        return shared(sorted(groups, key=lambda group: not group), shape.num_units)  # empty ones last

    return min(map(batches, found), key=lambda by_unit: shape_seconds(shape, problem.seconds, by_unit))


def inter_reorder(shape: PipelineShape, load: NDArray[np.float64], interleave: bool = False) -> NDArray[np.int64]:
    """Return the execution order of microbatches, `[microbatches]` numbers (Alg. 3): for 1F1B with a rank per stage,
    whatever the shape's family; or, with `interleave`, for interleaved 1F1B on the shape's ranks.

    `load [units, microbatches]` are seconds per stage. The smallest microbatch is first. The last ones (p - 1 under
    1F1B), whose intervals between two backwards of the first rank no forward fills, are the next smallest. In between
    come the microbatches whose forwards best fill their intervals, one per stage of the rank (6.2); intervals are
    simulated with every unit's real forward and backward, from the microbatches placed so far. The first interval takes
    all microbatches that begin before the first backward, so that 1F1B fills l - 2p + 2 intervals. With too few
    microbatches for that, the order is searched directly. Raises ValueError as `interleaved` does.
    """
    if not interleave:
        shape = replace(shape, family=one_f_one_b, ranks=None)
    root = next(unit for unit in range(shape.num_units) if all(unit not in feeds for feeds in shape.feeds))
    rank = _FirstRank.of(shape, root, load.shape[1])
    begun, unfilled = rank.begun(), rank.unfilled()
    if load.shape[1] < len(begun) + unfilled:
        return order_search(shape, load, evaluations=2000, seed=0)
    size = np.asarray(shape.stages) @ load
    left = [int(number) for number in np.argsort(size, kind="stable")]
    placed, rear, left = left[:1], left[1 : 1 + unfilled], left[1 + unfilled :]
    forward = load[root] / (1 + shape.backward[root])
    if len(begun) > 1 and left:
        # The first interval: the remaining work of microbatch 1 beyond the first rank, or beyond its first stage if
        # that has no backward.
        own = begun[0] * forward[placed[0]]
        downstream = rank.intervals(load[:, placed]).get(0, [own + (size - load[root])[placed[0]]])[0] - own
        ascending = sorted(left, key=lambda number: (forward[number], number))
        sums = np.correlate(forward[ascending], begun[1:].astype(np.float64), "valid")
        at = int(np.argmin(np.abs(sums - downstream)))
        placed += ascending[at : at + len(begun) - 1]
        left = [number for number in left if number not in set(placed)]
    while left:
        volumes = np.asarray(rank.intervals(load[:, placed]).get(len(placed), [0.0]))
        best = min(left, key=lambda number: (np.abs(forward[number] - volumes).sum(), number))
        placed.append(best)
        left.remove(best)
    return np.asarray([*placed, *rear], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _FirstRank:
    """The rank of the pipeline's first stage in a step of `count` microbatches: its `ops` of the unit `root`, in order.
    `path` is the number of stages from there to the end."""

    graph: ScheduleGraph
    unit: NDArray[np.int64]
    share: NDArray[np.float64]
    slot: NDArray[np.int64]
    ops: NDArray[np.int64]
    path: int

    @classmethod
    def of(cls, shape: PipelineShape, root: int, count: int) -> _FirstRank:
        graph = shape_graph(shape, shared([(slot,) for slot in range(count)], shape.num_units))
        unit, share = op_shares(shape, graph)
        stage = int(graph.arrays.stages_of[root, 0])
        mine = graph.packed.ranks.index(graph.arrays.placed[stage].stage.ranks[0])
        ops = np.arange(graph.list_offsets[mine], graph.list_offsets[mine + 1])
        slot = graph.packed.pieces.microbatch[graph.piece]
        return cls(graph, unit, share, slot, ops[unit[ops] == root], path_depths(graph.plan)[stage])

    @property
    def is_backward(self) -> NDArray[np.bool_]:
        return np.asarray(self.graph.kind[self.ops] == BACKWARD)

    def begun(self) -> NDArray[np.int64]:
        """Return, per microbatch, the number of forwards before the first backward. Without backwards, as many forwards
        are counted as the path has stages."""
        backward = np.flatnonzero(self.is_backward)
        return np.bincount(self.slot[self.ops[: backward[0] if len(backward) else self.path]], minlength=1)

    def unfilled(self) -> int:
        """Return the number of microbatches with a backward that directly follows another backward at the end."""
        forward = np.flatnonzero(~self.is_backward)
        if len(forward) == len(self.ops):
            return self.path - 1
        return len(np.unique(self.slot[self.ops[forward[-1] + 2 :]]))

    def intervals(self, load: NDArray[np.float64]) -> dict[int, list[float]]:
        """Map each microbatch to the idle seconds between two backwards (or before the first) into which its forwards
        fall, in a step with only the first microbatches, of `load`."""
        cost = np.zeros((len(load), int(self.slot.max()) + 1))
        cost[:, : load.shape[1]] = load
        seconds = cost[self.unit, self.slot] * self.share
        end = op_ends(self.graph, seconds)
        found: dict[int, list[float]] = {}
        last, here = 0.0, set[int]()
        for op, backward in zip(self.ops.tolist(), self.is_backward.tolist(), strict=True):
            if not backward:
                here.add(int(self.slot[op]))
                continue
            for number in here:
                found.setdefault(number, []).append(float(end[op] - seconds[op]) - last)
            last, here = float(end[op]), set()
        return found


def order_search(shape: PipelineShape, load: NDArray[np.float64], evaluations: int, seed: int) -> NDArray[np.int64]:
    """Return an execution order of microbatches of `load [units, microbatches]`, as `[microbatches]` numbers."""
    count = load.shape[1]
    model = step_model(shape, count)
    slot_of = np.arange(count)
    kernels.anneal(
        np.ascontiguousarray(load), np.zeros(count), np.inf, slot_of, count, model.before, model.cost_of, model.share,
        model.last, model.fixed, evaluations if count > 1 else 0, False, START_THRESHOLD, seed,
    )  # fmt: skip
    order = np.empty(count, dtype=np.int64)
    order[slot_of] = np.arange(count)
    return order
