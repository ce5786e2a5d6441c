"""What a chart says in plain sentences."""

from __future__ import annotations

from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart
from dilatant.report.gantt_tables import stage_name
from dilatant.report.wording import layers_text, listed, lost_to, percent_text, ranks_text, seconds_text

NOTABLE = 0.01
"""Losses below one percent of device time are not worth a reader's attention."""


def losses(timeline: GanttChart) -> str:
    """How much of the time devices compute, and what the rest is lost on."""
    busy = timeline.busy_fraction()
    sentence = f"Devices compute {percent_text(busy)} of the time."
    lost = [
        f"{percent_text(part)} on {lost_to(cause)}"
        for cause, part in timeline.idle_fractions().items()
        if part >= NOTABLE
    ]
    return f"{sentence} The rest is lost: {listed(lost[:4])}." if lost else sentence


def pace(timeline: GanttChart, plan: Plan) -> list[str]:
    """Which stage sets the pace; nothing where no time passed."""
    busy = timeline.busy_seconds()
    if not busy or timeline.seconds <= 0.0:
        return []
    slowest = max(range(len(busy)), key=lambda lane: busy[lane])
    lane = timeline.lanes[slowest]
    placed = [plan.stages()[index] for index in lane.stages]
    names = listed(
        [f"{stage.unit} (layers {layers_text(stage.stage.first, stage.stage.end)})" for stage in placed]
    )
    who = f"{'ranks' if len(lane.ranks) > 1 else 'rank'} {ranks_text(lane.ranks)}"
    part = percent_text(busy[slowest] / timeline.seconds)
    return [f"The busiest stage sets the pace: {names} on {who} computes {part} of the step."]


def by_lane(timeline: GanttChart, plan: Plan) -> str:
    """The step's seconds, and for every lane how much of them its ranks compute and what the rest is lost on."""
    stages = plan.stages()
    lines = [f"step {seconds_text(timeline.seconds)}"]
    for lane, busy, idle in zip(timeline.lanes, timeline.busy_seconds(), timeline.idle, strict=True):
        lost = sorted(idle.items(), key=lambda cause: -cause[1])
        shares = [f"computes {percent_text(busy / timeline.seconds)}"]
        shares += [f"{lost_to(cause)} {percent_text(seconds / timeline.seconds)}" for cause, seconds in lost]
        name = stage_name([stages[index] for index in lane.stages])
        lines.append(f"rank {ranks_text(lane.ranks)} ({name}): {', '.join(shares)}")
    return "\n".join(lines)
