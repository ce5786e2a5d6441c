"""Timelines and the table below them: each stage's time by action and by cause of idle time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dilatant.plan import Plan
from dilatant.plan.plan import PlacedStage
from dilatant.report.gantt import BETWEEN, UPDATE, GanttChart
from dilatant.report.parts import HUES, Cell, Column, PageSection, Part, Table, bar_part, legend, number
from dilatant.report.text.wording import ACTION_NAMES, lost_to, percent_text
from dilatant.schedule.timeline import COMMUNICATION, DRAIN, IMBALANCE, WAITING_FOR_DATA, WARM_UP, waiting_for

_TONES = {WARM_UP: "c0", DRAIN: "c1", COMMUNICATION: "c2", IMBALANCE: "c3", BETWEEN: "c4", UPDATE: "c4",
          WAITING_FOR_DATA: "c5"}  # fmt: skip


def timeline_parts(charts: Mapping[str, GanttChart], plan: Plan) -> list[Part]:
    """Return charts by title, with a legend entry for every drawn pair of unit and kind of action."""
    stages = plan.stages()
    units = [unit.name for unit in plan.units]
    drawn = {
        (units.index(stages[row.stage].unit) if row.stage >= 0 else len(units), row.kind)
        for chart in charts.values()
        for row in chart.rows
    }
    entries = []
    for unit, kind in sorted(drawn, key=lambda pair: _shade_order(*pair)):
        shade = kind if kind in ACTION_NAMES else "other"
        name = f"{units[unit]} {ACTION_NAMES.get(kind, kind)}" if unit < len(units) else kind
        entries.append({"name": name, "tone": f"shade u{unit % HUES} {shade}"})
    entries.append({"name": "idle", "tone": "idle"})
    return [("timeline", {"index": index, "title": title, "legend": entries}) for index, title in enumerate(charts)]


def cause_tones(plan: Plan, causes: Iterable[str]) -> dict[str, str]:
    """Return the colour of each cause of idle time, equal on every page. Waiting for a unit has the unit's hue."""
    waits = {waiting_for(unit.name): f"wait u{order % HUES}" for order, unit in enumerate(plan.units)}
    return {cause: waits.get(cause) or _TONES.get(cause, "c5") for cause in causes}


def idle_section(timeline: GanttChart, plan: Plan, tones: Mapping[str, str]) -> Part:
    """Return a line for each unit and stage position, mean over replicas: work by action, idle time by cause."""
    stages = plan.stages()
    units = [unit.name for unit in plan.units]
    time = timeline.seconds or 1.0
    work: list[dict[tuple[int, str], float]] = [{} for _ in timeline.lanes]
    for row in timeline.rows:
        unit = units.index(stages[row.stage].unit) if row.stage >= 0 else len(units)
        shade = row.kind if row.kind in ACTION_NAMES else "other"
        work[row.lane][unit, shade] = work[row.lane].get((unit, shade), 0.0) + row.seconds / time
    rows = []
    for name, lanes in _lanes_alike(timeline, plan).items():
        parts = []
        busy: dict[tuple[int, str], float] = {}
        for lane in lanes:
            for key, part in work[lane].items():
                busy[key] = busy.get(key, 0.0) + part / len(lanes)
        for (unit, shade), part in sorted(busy.items(), key=lambda item: _shade_order(*item[0])):
            label = f"{units[unit]} {ACTION_NAMES.get(shade, shade)}" if unit < len(units) else "other work"
            parts.append(bar_part(label, part, f"shade u{unit % HUES} {shade}"))
        lost = {
            cause: sum(timeline.idle[lane].get(cause, 0.0) for lane in lanes) / len(lanes) / time
            for cause in (timeline.idle_fractions() if timeline.idle else ())
        }
        parts += [bar_part(lost_to(cause), part, tones[cause]) for cause, part in lost.items() if part > 0.0]
        worst = max(lost, key=lambda cause: lost[cause], default="")
        notable = worst and lost[worst] >= 0.005
        rows.append(
            (
                name + (f" (× {len(lanes)})" if len(lanes) > 1 else ""),
                Cell(parts=parts),
                percent_text(sum(busy.values())),
                f"{lost_to(worst)}, {percent_text(lost[worst])}" if notable else "",
            )
        )
    columns = (
        Column("Stage"), Column("Time", "wide"), number("computes"), Column("Largest loss", label="most lost:")
    )  # fmt: skip
    entries = legend({lost_to(cause): tone for cause, tone in tones.items()} or {"waiting": "idle"})
    return "section", PageSection(
        "idle",
        "Where the time goes",
        "Each line is all the time of its devices in one step: coloured while they compute, by cause while they wait.",
        [("table", Table(columns, rows, legend=entries, most=12, more="more stages"))],
    )


def stage_name(placed: Sequence[PlacedStage]) -> str:
    """Return the names of the stages on a device: "vision 0 + language 1"."""
    return " + ".join(dict.fromkeys(f"{stage.unit} {stage.position}" for stage in placed)) or "other"


def _lanes_alike(timeline: GanttChart, plan: Plan) -> dict[str, list[int]]:
    """Return lanes by unit and position, over all replicas, which tables show as one line."""
    stages = plan.stages()
    groups: dict[str, list[int]] = {}
    for index, lane in enumerate(timeline.lanes):
        groups.setdefault(stage_name([stages[one] for one in lane.stages]), []).append(index)
    return groups


def _shade_order(unit: int, kind: str) -> tuple[int, int]:
    return unit, list(ACTION_NAMES).index(kind) if kind in ACTION_NAMES else len(ACTION_NAMES)
