"""The pipeline that a microbatch policy plans for: stages per unit, edges between units, and in-flight depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.schedule.families.families import ScheduleFamily, eager
from dilatant.schedule.packed import BACKWARD, FORWARD
from dilatant.schedule.schedule import Assignment, Microbatch
from dilatant.schedule.simulator.graph import ScheduleGraph, build
from dilatant.schedule.trainability import Trainability

ByUnit = tuple[tuple[Microbatch, ...], ...]


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline of one replica per unit.

    `stages[unit]` is a count; `feeds[unit]` are the units that consume its output; `backward[unit]` is backward seconds
    per forward second, 0 for a unit with nothing trainable in or before it; `fixed_seconds[unit]` is the time per
    microbatch and stage in addition to that of its samples; `family` is the schedule that runs. `ranks` lists the rank
    of each stage, in unit order; stages on equal ranks take turns. By default every stage has its own rank.
    """

    stages: tuple[int, ...]
    feeds: tuple[tuple[int, ...], ...]
    backward: tuple[float, ...]
    fixed_seconds: tuple[float, ...]
    family: ScheduleFamily = eager
    ranks: tuple[int, ...] | None = None

    @property
    def num_units(self) -> int:
        return len(self.stages)

    @property
    def anchor(self) -> int:
        """The unit that most others feed (the first of equals): the language model, fed by its encoders."""
        return max(range(self.num_units), key=lambda unit: sum(unit in feeds for feeds in self.feeds))

    def plan(self) -> Plan:
        """Return a plan of this shape; units are named by their numbers."""
        units, first = [], 0
        ranks = range(sum(self.stages)) if self.ranks is None else self.ranks
        for unit, count in enumerate(self.stages):
            stages = tuple(Stage(s, s + 1, (ranks[first + s],)) for s in range(count))
            first += count
            units.append(UnitPlan(str(unit), (Replica(stages),), tuple(str(other) for other in self.feeds[unit])))
        return Plan(tuple(units))

    def trainability(self) -> Trainability:
        """Return a trainability with a backward and weight gradients where `backward` is above 0."""
        backward = tuple(
            ratio > 0 for ratio, count in zip(self.backward, self.stages, strict=True) for _ in range(count)
        )
        return Trainability(backward, backward)


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchProblem:
    """Samples of one pipeline to group into `num_microbatches`. `seconds` `[samples, units]` are forward plus backward
    on each stage of a unit; a microbatch holds at most `capacity` of `weight` `[samples]`."""

    seconds: NDArray[np.float64]
    num_microbatches: int
    shape: PipelineShape
    weight: NDArray[np.float64]
    capacity: float
    seed: int


def default_shape(num_units: int, num_stages: int = 4) -> PipelineShape:
    """Return a shape in which every unit feeds the last, with equal stage counts; backward takes twice the forward."""
    last = num_units - 1
    feeds = tuple((last,) if unit < last else () for unit in range(num_units))
    return PipelineShape((num_stages,) * num_units, feeds, (2.0,) * num_units, (0.0,) * num_units)


def shape_graph(shape: PipelineShape, by_unit: ByUnit) -> ScheduleGraph:
    """Return the compiled schedule of these microbatches under the shape's family."""
    plan = shape.plan()
    assignment = Assignment({str(unit): (batches,) for unit, batches in enumerate(by_unit)})
    return build(plan, assignment, shape.family(plan, assignment, shape.trainability()))


def op_shares(shape: PipelineShape, graph: ScheduleGraph) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return each op's unit and the fraction of its microbatch's seconds that it takes, `[ops]` each. The halves of a
    split backward take equal fractions."""
    unit = graph.arrays.unit_of[graph.arrays.chain[graph.stage]]
    ratio = np.asarray(shape.backward)[unit]
    share = np.select([graph.kind == FORWARD, graph.kind == BACKWARD], [np.ones(len(ratio)), ratio], ratio / 2)
    return unit, share / (1.0 + ratio)


def shape_seconds(shape: PipelineShape, seconds: NDArray[np.float64], by_unit: ByUnit) -> float:
    """Return a step's exact time; `seconds [samples, units]` are forward plus backward on each stage of the unit."""
    from dilatant.schedule.simulator.simulate import step_seconds

    graph = shape_graph(shape, by_unit)
    pieces = graph.packed.pieces
    piece, piece_unit = pieces.of_samples, graph.arrays.unit_of[pieces.chain]
    load = np.bincount(piece, seconds[pieces.samples, piece_unit[piece]], len(piece_unit))
    load = load + np.where(load > 0, np.asarray(shape.fixed_seconds)[piece_unit], 0.0)
    _, share = op_shares(shape, graph)
    return step_seconds(graph, load[graph.piece] * share)


def shared(by_slot: Sequence[Microbatch], num_units: int) -> ByUnit:
    """Return the same microbatches for every unit."""
    return (tuple(by_slot),) * num_units
