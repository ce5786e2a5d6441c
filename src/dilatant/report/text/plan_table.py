"""Plan report on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dilatant.report.plan_report import MemoryUse, PlanReport
from dilatant.report.say import plain_table, print_indented, print_line, print_table
from dilatant.report.text.plan_summary import explain, suggest, summarize
from dilatant.report.text.wording import (
    bytes_text,
    count_text,
    layers_text,
    lost_to,
    percent_text,
    ranks_text,
    seconds_text,
)

_STAGES_SHOWN = 24
_WIDE = 120  # console width from which tables show all columns


def print_plan(report: PlanReport, console: Console) -> None:
    """Print the summary, the layout with each stage's work, and the compared plans."""
    zero = f", zero {report.zero}" if report.zero else ""
    print_line(
        console,
        (report.title, "bold"),
        (f"  {report.hardware}, {report.schedule}{zero}, costs {report.cost_source}", "dim"),
    )
    for warning in report.warnings:
        print_line(console, ("warning: ", "yellow"), warning)
    for sentence in summarize(report):
        print_indented(console, sentence)
    for sentence in suggest(report):
        print_indented(console, ("→ ", "cyan"), sentence)
    wide = console.width >= _WIDE
    console.print()
    print_table(console, _stages(report, wide))
    if report.sizes:
        print_table(console, _sizes(report, wide))
    if report.candidates:
        print_table(console, _candidates(report, wide))


def _stages(report: PlanReport, wide: bool) -> Table:
    """Return one line per stage; equally cut stages of several replicas share one."""
    extra = ("tp×cp", "") if wide else ()
    table = _table(
        "stage", "layers", "ranks", *extra, "computes" if wide else "busy", "largest loss", "memory"
    )
    stages, timeline = report.plan.stages(), report.timeline
    memory = {index: use for use in report.memory for index in use.stages}
    busy = timeline.busy_seconds()
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, lane in enumerate(timeline.lanes):
        key = tuple(
            (stages[i].unit, stages[i].position, stages[i].stage.first, stages[i].stage.end)
            for i in lane.stages
        )
        alike.setdefault(key, []).append(number)
    for lanes in list(alike.values())[:_STAGES_SHOWN]:
        placed = [stages[index] for index in timeline.lanes[lanes[0]].stages]
        if not placed:
            continue
        part = sum(busy[lane] for lane in lanes) / len(lanes) / (timeline.seconds or 1.0)
        lost = _mean_idle(report, lanes)
        worst = max(lost, key=lambda cause: lost[cause], default="")
        use = memory.get(placed[0].index)
        ranks = [rank for lane in lanes for rank in timeline.lanes[lane].ranks]
        shown = ranks_text(ranks)
        table.add_row(
            " + ".join(f"{one.unit} {one.position}" for one in placed)
            + (f" ×{len(lanes)}" if len(lanes) > 1 else ""),
            " + ".join(layers_text(one.stage.first, one.stage.end) for one in placed),
            shown if len(shown) <= (20 if wide else 8) else f"{len(ranks):,} ranks",
            *((f"{placed[0].stage.tp}×{placed[0].stage.cp}", _bar(part)) if wide else ()),
            percent_text(part),
            f"{lost_to(worst) if wide else worst} {percent_text(lost[worst])}" if worst else "",
            "" if use is None else _memory(use, wide),
            style="red" if use and use.fraction > 1.0 else None,
        )
    if len(alike) > _STAGES_SHOWN:
        table.caption = f"{len(alike) - _STAGES_SHOWN} more stages: see the page or --json"
    return table


def _memory(use: MemoryUse, wide: bool) -> str:
    part = percent_text(use.fraction)
    return f"{bytes_text(use.peak_bytes)} ({part})" if wide else part


def _mean_idle(report: PlanReport, lanes: list[int]) -> dict[str, float]:
    idle = report.timeline.idle
    lost: dict[str, float] = {}
    for lane in lanes if idle else ():
        for cause, seconds in idle[lane].items():
            lost[cause] = lost.get(cause, 0.0) + seconds / len(lanes) / (report.timeline.seconds or 1.0)
    return lost


def _sizes(report: PlanReport, wide: bool) -> Table:
    title, extra = ("tokens per sample", ("median",)) if wide else ("tokens", ())
    table = _table(title, "distribution", "mean", *extra, "95 %", "largest", "share of work")
    for sizes in report.sizes:
        share = ""
        if report.ratio and sizes.unit in report.ratio.shares:
            low, high = report.ratio.low[sizes.unit], report.ratio.high[sizes.unit]
            share = f"{percent_text(report.ratio.shares[sizes.unit])} ({100 * low:.1f}–{100 * high:.1f})"
        table.add_row(
            sizes.unit,
            sparkline(sizes.counts),
            count_text(sizes.mean),
            *((count_text(sizes.median),) if wide else ()),
            *(count_text(value) for value in (sizes.p95, sizes.largest)),
            share,
        )
    return table


def _candidates(report: PlanReport, wide: bool) -> Table:
    extra = ("memory", "devices", "layout", "why") if wide else ()
    table = _table("plan", "step", "against ours" if wide else "slower", *extra)
    chosen = report.chosen
    for one in report.ranked:
        name = f"✓ {one.name}" if one.chosen else one.name
        table.add_row(
            name if wide or not one.layout else Text.assemble(name, "\n", (one.layout, "dim")),
            seconds_text(one.step_seconds),
            "" if one.chosen else _relative(one.step_seconds / chosen.step_seconds - 1),
            *(
                (percent_text(one.peak_memory), f"{one.devices:,}", one.layout, explain(one, chosen))
                if wide
                else ()
            ),
            style="bold" if one.chosen else "red" if one.peak_memory > 1.0 else None,
        )
    return table


def _relative(fraction: float) -> str:
    return f"{'+' if fraction >= 0 else ''}{percent_text(fraction)}"


def sparkline(values: tuple[float, ...] | list[float]) -> str:
    """Return values as eight heights of block characters; the largest is full, zero a blank."""
    tallest = max(values, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[min(int(8 * value / tallest + 0.999), 8)] for value in values)


def _bar(part: float, width: int = 12) -> Text:
    filled = round(min(max(part, 0.0), 1.0) * width)
    return Text("█" * filled, style="green") + Text("░" * (width - filled), style="dim")


def _table(*columns: str) -> Table:
    return plain_table(
        columns,
        right={
            "devices", "step", "against ours", "slower", "memory", "mean", "median", "95 %", "largest", "computes",
            "busy",
        },
        whole={"stage", "step", "busy", "memory", "distribution", "against ours", "slower", "share of work"},
    )  # fmt: skip
