"""Gantt chart of one step, predicted or measured: lanes of ranks with the actions on them; and how steps become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dilatant.plan import Plan
from dilatant.schedule.schedule import Action, DataWait, MeasuredAction
from dilatant.schedule.timeline import COMMUNICATION, DRAIN, IMBALANCE, WAITING_FOR_DATA, WARM_UP, Timeline, waiting_for

UPDATE = "update"
"""Cause of the time in which ranks compute no action, as they update weights."""
BETWEEN = "between actions"
"""Cause of measured time in which a rank neither computed nor waited for rows."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks that do the same things at the same time, drawn as one line.

    `stages` are the numbers (`PlacedStage.index`) of the stages they hold: one, or several if units are colocated. A
    predicted lane has all tp x cp ranks of its stages, a measured lane usually a single rank.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


class GanttRow(NamedTuple):
    """One action: `kind` is F, B, I or W, or another word for work outside any stage (`stage` -1).

    `samples` are positions in the global batch; `start` is in seconds since the step began.
    """

    lane: int
    stage: int
    kind: str
    microbatch: int
    samples: tuple[int, ...]
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class GanttChart:
    """A chart: `rows` sorted by lane and start; `idle[lane]` has seconds by cause, empty if causes are unknown."""

    seconds: float
    lanes: tuple[Lane, ...]
    rows: tuple[GanttRow, ...]
    idle: tuple[dict[str, float], ...] = ()

    def busy_seconds(self) -> tuple[float, ...]:
        """Return the seconds that each lane computes."""
        busy = [0.0] * len(self.lanes)
        for row in self.rows:
            busy[row.lane] += row.seconds
        return tuple(busy)

    def idle_fractions(self) -> dict[str, float]:
        """Return the fraction of all device time that is idle by cause, largest first (lanes count once per rank)."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        if total <= 0.0:
            return {}
        causes: dict[str, float] = {}
        for lane, idle in zip(self.lanes, self.idle):
            for cause, seconds in idle.items():
                causes[cause] = causes.get(cause, 0.0) + seconds * len(lane.ranks) / total
        return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))

    def busy_fraction(self) -> float:
        """Return the fraction of all device time spent computing."""
        total = self.seconds * sum(len(lane.ranks) for lane in self.lanes)
        busy = sum(len(lane.ranks) * seconds for lane, seconds in zip(self.lanes, self.busy_seconds()))
        return busy / total if total > 0.0 else 0.0


def predicted_chart(timeline: Timeline, sync_seconds: float = 0.0, update: float = 0.0) -> GanttChart:
    """Return a chart with one lane for all ranks that act identically (the tp x cp ranks of a predicted stage).

    An action's samples are its part if it names one, else its whole microbatch. After the last action every rank waits
    `sync_seconds`: for its weights to be updated, and for gradients, which counts as communication.
    """
    placed, held = timeline.plan.stages(), timeline.plan.stages_of_rank

    def samples(action: Action) -> tuple[int, ...]:
        if action.samples is not None:
            return action.samples
        stage = placed[action.stage]
        return timeline.assignment.microbatches[stage.unit][stage.replica][action.microbatch]

    members: dict[tuple[tuple[int, ...], bytes, bytes], list[int]] = {}
    for index, rank in enumerate(timeline.ranks):
        rows = slice(int(timeline.offsets[index]), int(timeline.offsets[index + 1]))
        key = (tuple(stage.index for stage in held[rank]), timeline.start[rows].tobytes(), timeline.end[rows].tobytes())
        members.setdefault(key, []).append(index)
    lanes: list[Lane] = []
    lines: list[GanttRow] = []
    idle: list[dict[str, float]] = []
    for (stages, _, _), indices in members.items():
        lane = len(lanes)
        lanes.append(Lane(tuple(timeline.ranks[index] for index in indices), stages))
        causes = zip(timeline.causes, timeline.idle[indices[0]].tolist(), strict=True)
        idle.append({cause: seconds for cause, seconds in causes if seconds > 0.0})
        for cause, seconds in ((COMMUNICATION, sync_seconds - update), (UPDATE, min(update, sync_seconds))):
            if seconds > 1e-9 * sync_seconds:  # else the means of steps are rounded
                idle[lane][cause] = idle[lane].get(cause, 0.0) + seconds
        for action, start, end in timeline.of_rank(timeline.ranks[indices[0]]):
            kind = str(action.kind)
            lines.append(GanttRow(lane, action.stage, kind, action.microbatch, samples(action), start, end - start))
    return GanttChart(timeline.seconds + sync_seconds, tuple(lanes), tuple(lines), tuple(idle))


def measured_chart(actions: Sequence[MeasuredAction], plan: Plan, waits: Sequence[DataWait] = ()) -> GanttChart:
    """Return a chart with one lane per rank of `plan`, from the first action (or wait in `waits`) to the last end.

    Idle time has the same names as in a prediction: warm-up before a rank's first action (unless the rank holds whole
    pipelines, which are not filled), drain after its last, and waiting for the unit whose rows it awaited (its own
    unit: imbalance). Raises ValueError without actions.
    """
    if not actions:
        raise ValueError("nothing was measured")
    starts = [*(one.start for one in actions), *(one.start for one in waits)]
    begin, end = min(starts), max(one.end for one in actions)
    waited = {one.rank: one.seconds for one in waits}
    held = plan.stages_of_rank
    places = {rank: {(placed.unit, placed.position) for placed in own} for rank, own in held.items()}
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
            awaited = one.unit if one.waited_for is None else held[one.waited_for][0].unit
            causes[IMBALANCE if awaited == one.unit else waiting_for(awaited)] += one.waited_seconds
            before, action = one.end, one.action
            start = one.start + one.waited_seconds - begin
            rows.append(
                GanttRow(lane, action.stage, str(action.kind), action.microbatch, one.samples, start, one.seconds)
            )
        causes[DRAIN] += end - before
        idle.append({cause: seconds for cause, seconds in causes.items() if seconds > 0.0})
    lanes = tuple(Lane((rank,), tuple(placed.index for placed in own)) for rank, own in held.items())
    return GanttChart(end - begin, lanes, tuple(rows), tuple(idle))
