"""Comparison of a predicted and a measured step: expected and actual seconds by unit and by cause of idle time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart
from dilatant.report.parts import HUES, Cell, Column, PageSection, Part, Table, bar_part, number
from dilatant.report.text.wording import lost_to, seconds_text
from dilatant.schedule.timeline import Timeline

OTHER_WORK = "other work"


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted actions of a measured step. origin: source of the costs ("measured on ...")."""

    timeline: Timeline
    origin: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of a step, mean over devices. is_work: compute of the unit `name`; else idle by the cause `name`."""

    name: str
    is_work: bool
    predicted_seconds: float
    measured_seconds: float

    @property
    def seconds(self) -> float:
        """Measured minus predicted seconds."""
        return self.measured_seconds - self.predicted_seconds


def compare_steps(predicted: GanttChart, measured: GanttChart, plan: Plan) -> tuple[Difference, ...]:
    """Return the work of every unit, then every cause of idle time, the largest difference first.
    In both charts these seconds add up to the step."""
    work = _means(predicted, work_by_unit(predicted, plan)), _means(measured, work_by_unit(measured, plan))
    idle = tuple(
        {cause: part * chart.seconds for cause, part in chart.idle_fractions().items()}
        for chart in (predicted, measured)
    )
    differences = [
        [Difference(name, is_work, one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}]
        for is_work, (one, other) in ((True, work), (False, idle))
    ]
    return (*differences[0], *sorted(differences[1], key=lambda one: -abs(one.seconds)))


def work_by_unit(timeline: GanttChart, plan: Plan) -> dict[str, float]:
    """Return compute seconds by unit, in the plan's order, summed over ranks; work of no unit is `OTHER_WORK`."""
    unit_of = [placed.unit for placed in plan.stages()]
    work = dict.fromkeys((unit.name for unit in plan.units), 0.0)
    for row in timeline.rows:
        unit = unit_of[row.stage] if row.stage >= 0 else OTHER_WORK
        work[unit] = work.get(unit, 0.0) + row.seconds * len(timeline.lanes[row.lane].ranks)
    return work


def comparison_section(
    predicted: GanttChart, measured: GanttChart, plan: Plan, tones: Mapping[str, str], note: str
) -> Part:
    """Return two bars of one scale, and a line for each difference."""
    differences = compare_steps(predicted, measured, plan)
    units = [unit.name for unit in plan.units]
    longest = max(predicted.seconds, measured.seconds) or 1.0

    def tone(one: Difference) -> str:
        if not one.is_work:
            return tones[one.name]
        return f"shade u{units.index(one.name) % HUES} B" if one.name in units else "shade other"

    def line(name: str, before: float, after: float, shown: str) -> tuple[str | Cell, ...]:
        relative = f"{100 * (after / before - 1.0):+.1f} %" if before > 0.0 else ""
        sign = "−" if after < before else "+" if after > before else ""
        return (
            Cell(name, tone=shown), _text(before), _text(after), sign + _text(abs(after - before)),
            relative.replace("-", "−"),
        )  # fmt: skip

    named = [(f"{one.name} computes" if one.is_work else lost_to(one.name), one) for one in differences]
    bars = []
    for title, chart, attribute in (
        ("predicted", predicted, "predicted_seconds"),
        ("measured", measured, "measured_seconds"),
    ):
        parts = [
            bar_part(name, seconds / longest, tone(one), seconds_text(seconds))
            for name, one in named
            if (seconds := getattr(one, attribute)) > 0.0
        ]
        bars.append((title, Cell(parts=parts), seconds_text(chart.seconds)))
    lines = [line("The step", predicted.seconds, measured.seconds, "")]
    lines += [line(name, one.predicted_seconds, one.measured_seconds, tone(one)) for name, one in named]
    figures = (number("predicted"), number("measured"), number("difference", ""), Column("", "number soft"))
    return "section", PageSection(
        "comparison",
        "Predicted beside measured",
        f"The mean over devices; what is below the step adds up to it. {note}",
        [
            ("table", Table((Column(), Column("", "whole"), Column("", "number")), bars, style="")),
            ("table", Table((Column("Seconds of"), *figures), lines, "figures stack", ["total"] + [""] * len(named))),
        ],
    )


def _text(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "0"


def _means(chart: GanttChart, seconds: dict[str, float]) -> dict[str, float]:
    devices = sum(len(lane.ranks) for lane in chart.lanes) or 1
    return {name: total / devices for name, total in seconds.items()}
