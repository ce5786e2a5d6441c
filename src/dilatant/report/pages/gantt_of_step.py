"""Conversion of a predicted or measured step into a Gantt chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dilatant.plan import Plan
from dilatant.report.gantt import BETWEEN, GanttChart, GanttRow, Lane
from dilatant.schedule.measured import DataWait, MeasuredAction
from dilatant.schedule.schedule import Action
from dilatant.schedule.timeline import (
    COMMUNICATION,
    DRAIN,
    IMBALANCE,
    WAITING_FOR_DATA,
    WARM_UP,
    Timeline,
    waiting_for,
)


def predicted_chart(timeline: Timeline, sync_seconds: float = 0.0) -> GanttChart:
    """Return a chart with one lane for all ranks that act identically (the tp x cp ranks of a predicted stage).

    An action's samples are its part if it names one, else its whole microbatch. After the last action every rank waits
    `sync_seconds` for gradients, which counts as communication.
    """
    placed = timeline.plan.stages()
    held: dict[int, list[int]] = {rank: [] for rank in timeline.ranks}
    for stage in placed:
        for rank in stage.stage.ranks:
            held[rank].append(stage.index)

    def samples(action: Action) -> tuple[int, ...]:
        if action.samples is not None:
            return action.samples
        stage = placed[action.stage]
        return timeline.assignment.microbatches[stage.unit][stage.replica][action.microbatch]

    members: dict[tuple[tuple[int, ...], bytes, bytes], list[int]] = {}
    for index, rank in enumerate(timeline.ranks):
        rows = slice(int(timeline.offsets[index]), int(timeline.offsets[index + 1]))
        key = (tuple(held[rank]), timeline.start[rows].tobytes(), timeline.end[rows].tobytes())
        members.setdefault(key, []).append(index)
    lanes: list[Lane] = []
    lines: list[GanttRow] = []
    idle: list[dict[str, float]] = []
    for (stages, _, _), indices in members.items():
        lane = len(lanes)
        lanes.append(Lane(tuple(timeline.ranks[index] for index in indices), stages))
        idle.append(
            {
                cause: seconds
                for cause, seconds in zip(timeline.causes, timeline.idle[indices[0]].tolist(), strict=True)
                if seconds > 0.0
            }
        )
        if sync_seconds > 0.0:
            idle[lane][COMMUNICATION] = idle[lane].get(COMMUNICATION, 0.0) + sync_seconds
        for action, start, end in timeline.of_rank(timeline.ranks[indices[0]]):
            kind = str(action.kind)
            lines.append(
                GanttRow(lane, action.stage, kind, action.microbatch, samples(action), start, end - start)
            )
    return GanttChart(timeline.seconds + sync_seconds, tuple(lanes), tuple(lines), tuple(idle))


def measured_chart(
    actions: Sequence[MeasuredAction], plan: Plan, waits: Sequence[DataWait] = ()
) -> GanttChart:
    """Return a chart with one lane per rank of `plan`, from the first action (or wait in `waits`) to the last end.

    Idle time has the same names as in a prediction: warm-up before a rank's first action (unless the rank holds whole
    pipelines, which are not filled), drain after its last, and waiting for the unit whose rows it awaited (its own
    unit: imbalance). Raises ValueError without actions.
    """
    if not actions:
        raise ValueError("nothing was measured")
    begin, end = (
        min([*(one.start for one in actions), *(one.start for one in waits)]),
        max(one.end for one in actions),
    )
    waited = {one.rank: one.seconds for one in waits}
    held: dict[int, list[int]] = {rank: [] for rank in plan.ranks}
    unit_of: dict[int, str] = {}
    places: dict[int, set[tuple[str, int]]] = {rank: set() for rank in plan.ranks}
    for placed in plan.stages():
        for rank in placed.stage.ranks:
            held[rank].append(placed.index)
            places[rank].add((placed.unit, placed.position))
            unit_of.setdefault(rank, placed.unit)
    everything = set().union(*places.values())
    of_rank: dict[int, list[MeasuredAction]] = {rank: [] for rank in plan.ranks}
    for one in sorted(actions, key=lambda action: action.start):
        of_rank[one.rank].append(one)
    rows: list[GanttRow] = []
    idle: list[dict[str, float]] = []
    for lane, (rank, own) in enumerate(of_rank.items()):
        causes: defaultdict[str, float] = defaultdict(float)
        causes[WAITING_FOR_DATA] = min(waited.get(rank, 0.0), (own[0].start if own else end) - begin)
        before = begin + causes[WAITING_FOR_DATA]
        first = BETWEEN if places[rank] == everything else WARM_UP
        for number, one in enumerate(own):
            causes[BETWEEN if number else first] += max(one.start - before, 0.0)
            awaited = one.unit if one.waited_for is None else unit_of[one.waited_for]
            causes[IMBALANCE if awaited == one.unit else waiting_for(awaited)] += one.waited_seconds
            before = one.end
            start = one.start + one.waited_seconds - begin
            rows.append(
                GanttRow(
                    lane,
                    one.action.stage,
                    str(one.action.kind),
                    one.action.microbatch,
                    one.samples,
                    start,
                    one.seconds,
                )
            )
        causes[DRAIN] += end - before
        idle.append({cause: seconds for cause, seconds in causes.items() if seconds > 0.0})
    lanes = tuple(Lane((rank,), tuple(stages)) for rank, stages in held.items())
    return GanttChart(end - begin, lanes, tuple(rows), tuple(idle))
