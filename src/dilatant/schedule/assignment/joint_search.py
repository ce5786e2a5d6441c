"""Joint search over membership and order of microbatches, with the exact simulator as objective.

Tapered and even quite unequal microbatches beat balanced ones, and warm-up depth matters more than either; so the
search optimises the simulated step itself. It takes a seed and a number of evaluations instead of a time limit, and
uses only exact arithmetic, so every rank derives the same result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.schedule.assignment.pipeline_shape import MicrobatchProblem, PipelineShape, op_shares, shape_graph, shared
from dilatant.schedule.simulator.simulate import op_ends

START_THRESHOLD = 0.004
"""Changes that lengthen the step by this fraction are accepted at first. Chosen on the "vlm" distribution."""


@dataclass(frozen=True, slots=True, eq=False)
class StepModel:
    """A step of `num_slots` microbatches shared by all units, as arguments of the search kernel (see `step_time`)."""

    num_slots: int
    before: NDArray[np.int32]
    cost_of: NDArray[np.int32]
    share: NDArray[np.float64]
    last: NDArray[np.int64]
    fixed: NDArray[np.float64]

    @property
    def num_ops(self) -> int:
        return len(self.share)

    def seconds(self, load: NDArray[np.float64]) -> float:
        """Return the seconds of the step in which slot k costs each stage of unit u `load[u, k]`."""
        from dilatant.schedule.assignment import assign_kernels as kernels

        cost = np.where(load > 0, load + self.fixed[:, None], 0.0).ravel()
        end = np.zeros(self.num_ops + 1)
        return float(kernels.step_time(0, self.before, self.cost_of, self.share, self.last, cost, end))


def step_model(shape: PipelineShape, num_slots: int) -> StepModel:
    """Compile the step. Ops are ordered by their ends in a uniform step, so that a change to late microbatches leaves
    most of the previous computation valid."""
    graph = shape_graph(shape, shared([(slot,) for slot in range(num_slots)], shape.num_units))
    unit, share = op_shares(shape, graph)
    slot = graph.packed.pieces.microbatch[graph.piece]
    count = graph.num_ops
    by_end = np.argsort(op_ends(graph, share + 0.01)[graph.order], kind="stable")
    rank = np.empty(count + 1, dtype=np.int32)
    rank[by_end] = np.arange(count)
    rank[count] = count
    incoming = np.diff(graph.offsets)
    width = 1 + int(incoming.max(initial=0))
    before = np.full((count, width), count, dtype=np.int32)
    before[:, 0] = np.where(graph.previous >= 0, graph.previous, count)
    target = np.repeat(np.arange(count), incoming)
    column = 1 + np.arange(len(target)) - np.repeat(graph.offsets[:-1], incoming)
    before[target, column] = graph.source
    before = rank[before[by_end]]
    ops = graph.order[by_end]
    awaited = np.zeros(count + 1, dtype=bool)
    awaited[before.ravel()] = True
    return StepModel(
        num_slots,
        before,
        (unit[ops] * num_slots + slot[ops]).astype(np.int32),
        share[ops],
        np.flatnonzero(~awaited[:count]),
        np.asarray(shape.fixed_seconds, dtype=np.float64),
    )


def joint_search(
    model: StepModel, problem: MicrobatchProblem, slot_of: NDArray[np.int64], evaluations: int | None
) -> NDArray[np.int64]:
    """Improve `slot_of [samples]`, the same in all units; the step is never longer than before. `evaluations` is the
    number of simulated steps, by default as many as take about a tenth of a second."""
    from dilatant.schedule.assignment import assign_kernels as kernels

    if evaluations is None:
        evaluations = int(min(40_000, max(1_000, 40_000_000 // max(model.num_ops, 1))))
    result = slot_of.copy()
    kernels.anneal(
        np.ascontiguousarray(problem.seconds.T, np.float64), problem.weight, float(problem.capacity), result,
        model.num_slots, model.before, model.cost_of, model.share, model.last, model.fixed,
        evaluations if len(result) and model.num_slots > 1 else 0, True, START_THRESHOLD, problem.seed,
    )  # fmt: skip
    return result
