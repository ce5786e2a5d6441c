"""Step time from costs: the prediction used by the planner, and by training for the step that it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.costs.step_costs import StepCosts
from dilatant.plan.costs.workload import Workload
from dilatant.schedule.simulator.contention import travel
from dilatant.schedule.simulator.graph import ScheduleGraph
from dilatant.schedule.simulator.predict import (
    action_seconds,
    message_bytes,
    message_sums,
    op_sums,
    piece_sums,
    step_bytes,
)
from dilatant.schedule.simulator.simulate import op_ends, run
from dilatant.schedule.simulator.sync_overlap import synced_seconds
from dilatant.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class TimedStep:
    """A compiled schedule of one batch with the inputs of its simulation.

    `pieces` and `sums` are as in `piece_sums` and `op_sums`; `durations` [ops] seconds; `message` [messages] bytes;
    `lag` [messages] travel seconds, None without links. `seconds` lasts until the last action, `seconds_synced` until
    every rank has its summed gradients and all updated weights.
    """

    graph: ScheduleGraph
    costs: StepCosts
    pieces: NDArray[np.float64]
    sums: NDArray[np.float64]
    durations: NDArray[np.float64]
    lag: NDArray[np.float64] | None
    message: NDArray[np.float64]
    seconds: float
    seconds_synced: float

    def timeline(self) -> Timeline:
        """Return the whole simulated step, with idle time by cause and the memory sweep."""
        size = step_bytes(self.graph, self.costs.stages, self.sums, self.message)
        return run(self.graph, self.durations, lag=self.lag, size=size)


def time_step(graph: ScheduleGraph, costs: StepCosts, samples: Workload) -> TimedStep:
    """Time the step of `graph` on these samples."""
    pieces = piece_sums(graph, samples.tokens, samples.squares, samples.dense)
    sums = op_sums(graph, costs.stages, pieces, samples.tokens)
    message = message_bytes(graph, costs.stages, message_sums(graph, samples.tokens, samples.squares))
    durations = action_seconds(graph, costs.stages, sums)
    lag = None
    if costs.cluster is None:
        ends = op_ends(graph, durations)
    else:
        ends, lag = travel(graph, durations, message, costs.cluster)
    seconds = float(ends.max(initial=0.0))
    synced = max(seconds, synced_seconds(graph, costs, durations, ends))
    return TimedStep(graph, costs, pieces, sums, durations, lag, message, seconds, synced)
