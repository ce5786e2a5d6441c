"""Schedules: the Assignment and Schedule of a step, schedule families, and the simulator that times them."""

from dilatant.schedule.assignment.assign import Microbatches, assign_microbatches
from dilatant.schedule.assignment.pipeline_shape import PipelineShape
from dilatant.schedule.assignment.step_assignment import assign
from dilatant.schedule.dependencies import Message, messages
from dilatant.schedule.families.families import (
    eager,
    gpipe,
    half_eager,
    interleaved,
    one_f_one_b,
)
from dilatant.schedule.families.zero_bubble import split_backward, zero_bubble_h1, zero_bubble_h2
from dilatant.schedule.schedule import Action, ActionKind, Assignment, Microbatch, Schedule
from dilatant.schedule.simulator.graph import ScheduleError, ScheduleGraph, build
from dilatant.schedule.simulator.predict import predict
from dilatant.schedule.simulator.simulate import run, simulate, step_seconds
from dilatant.schedule.timeline import Timeline
from dilatant.schedule.trainability import Trainability, all_trainable, trainability_of
from dilatant.schedule.validate import schedule_problems

FAMILIES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "half-eager": half_eager,
    "eager": eager,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
}
"""Schedule families by the name that users write: (plan, assignment, trainability) -> Schedule."""

__all__ = [
    "FAMILIES",
    "Action",
    "ActionKind",
    "Assignment",
    "Message",
    "Microbatch",
    "Microbatches",
    "PipelineShape",
    "Schedule",
    "ScheduleError",
    "ScheduleGraph",
    "Timeline",
    "Trainability",
    "all_trainable",
    "assign",
    "assign_microbatches",
    "build",
    "eager",
    "gpipe",
    "half_eager",
    "interleaved",
    "messages",
    "one_f_one_b",
    "predict",
    "run",
    "schedule_problems",
    "simulate",
    "split_backward",
    "step_seconds",
    "trainability_of",
    "zero_bubble_h1",
    "zero_bubble_h2",
]
