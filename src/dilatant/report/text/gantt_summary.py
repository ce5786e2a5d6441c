"""Sentences that summarize a Gantt chart."""

from __future__ import annotations

from collections.abc import Sequence

from dilatant.config.degrees import Degrees
from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart
from dilatant.report.step_comparison import OTHER_WORK, work_by_unit
from dilatant.report.text.gantt_tables import stage_name
from dilatant.report.text.wording import layers_text, listed, lost_to, percent_text, ranks_text, seconds_text
from dilatant.schedule.schedule import DataWait

NOTABLE = 0.01
"""Losses below this fraction of device time are not mentioned."""


def losses(timeline: GanttChart, plan: Plan) -> str:
    """Return the fraction of time that devices compute, and the causes of the rest."""
    busy = timeline.busy_fraction()
    sentence = f"Devices {' or '.join(work_of(plan))} {percent_text(busy)} of the time."
    lost = [
        f"{percent_text(part)} on {lost_to(cause)}"
        for cause, part in timeline.idle_fractions().items()
        if part >= NOTABLE
    ]
    return f"{sentence} The rest is lost: {listed(lost[:4])}." if lost else sentence


def work_of(plan: Plan) -> tuple[str, ...]:
    """Return the verbs for what busy devices do: compute, and exchange inside groups of ranks if stages have such
    groups. The costs of layers include these exchanges."""
    stages = [placed.stage for placed in plan.stages()]
    degrees = [name for name in Degrees._fields if any(getattr(stage, name) > 1 for stage in stages)]
    inside = f"exchange inside {'/'.join(sorted(degrees, reverse=True))} groups"
    return ("compute", inside) if degrees else ("compute",)


def pace(timeline: GanttChart, plan: Plan) -> list[str]:
    """Return which stage sets the pace; empty if no time passed."""
    busy = timeline.busy_seconds()
    if not busy or timeline.seconds <= 0.0:
        return []
    slowest = max(range(len(busy)), key=lambda lane: busy[lane])
    lane = timeline.lanes[slowest]
    placed = [plan.stages()[index] for index in lane.stages]
    names = listed([f"{stage.unit} (layers {layers_text(stage.stage.first, stage.stage.end)})" for stage in placed])
    who = f"{'ranks' if len(lane.ranks) > 1 else 'rank'} {ranks_text(lane.ranks)}"
    part = percent_text(busy[slowest] / timeline.seconds)
    works = "computes" if len(work_of(plan)) == 1 else "is busy for"
    return [f"The busiest stage sets the pace: {names} on {who} {works} {part} of the step."]


def measurement(predicted: GanttChart, measured: GanttChart, plan: Plan) -> list[str]:
    """Return the error of a prediction against the measured step, for the step and the actions of each unit."""
    if measured.seconds <= 0.0 or predicted.seconds <= 0.0:
        return []
    error = measured.seconds / predicted.seconds - 1.0
    sentences = [
        f"A measured step took {seconds_text(measured.seconds)}, {percent_text(abs(error))} "
        f"{'longer' if error > 0 else 'less'} than the {seconds_text(predicted.seconds)} predicted."
    ]
    expected = work_by_unit(predicted, plan)
    off = [
        f"those of {unit} took {percent_text(abs(seconds / expected[unit] - 1.0))} "
        f"{'longer' if seconds > expected[unit] else 'less'}"
        for unit, seconds in work_by_unit(measured, plan).items()
        if expected.get(unit) and unit != OTHER_WORK
    ]
    return [*sentences, f"Of the actions alone, {listed(off)} than predicted."] if off else sentences


def data_waits(waits: Sequence[DataWait], step_seconds: float) -> list[str]:
    """Return the longest wait of a rank for samples, and the slowest samples; empty if the wait was short."""
    longest = max(waits, key=lambda one: one.seconds, default=None)
    if longest is None or longest.seconds < NOTABLE * step_seconds:
        return []
    sentence = f"Rank {longest.rank} waited {seconds_text(longest.seconds)} for samples to be decoded"
    slowest = listed([f"{name} ({seconds_text(seconds)})" for name, seconds in longest.slowest])
    remedy = "More data.workers, or producers on other machines (data.preprocess: ray), would shorten that."
    return [f"{sentence}; the slowest of its samples: {slowest}." if slowest else f"{sentence}.", remedy]


def by_lane(timeline: GanttChart, plan: Plan) -> str:
    """Return the step's seconds, and for every lane the fraction computed and the fractions lost by cause."""
    stages = plan.stages()
    lines = [f"step {seconds_text(timeline.seconds)}"]
    for lane, busy, idle in zip(timeline.lanes, timeline.busy_seconds(), timeline.idle, strict=True):
        lost = sorted(idle.items(), key=lambda cause: -cause[1])
        shares = [f"computes {percent_text(busy / timeline.seconds)}"]
        shares += [f"{lost_to(cause)} {percent_text(seconds / timeline.seconds)}" for cause, seconds in lost]
        name = stage_name([stages[index] for index in lane.stages])
        lines.append(f"rank {ranks_text(lane.ranks)} ({name}): {', '.join(shares)}")
    return "\n".join(lines)
