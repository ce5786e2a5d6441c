"""Plan report as a page, and the page of a measured step. Each is one HTML file that needs no network and opens from a
disk; the report is also shown on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart, measured_chart, predicted_chart
from dilatant.report.pages.charts import histogram
from dilatant.report.pages.model_graph import model_graph
from dilatant.report.pages.page import Page, pack_chart, render, write_page
from dilatant.report.parts import (
    HUES,
    Cell,
    Column,
    PageSection,
    Part,
    Table,
    bar_part,
    legend,
    number,
    plain_bar,
    summary,
    tiles,
)  # fmt: skip
from dilatant.report.plan_report import DeviceGroup, MemoryUse, PlanReport, SizeDistribution, WorkloadRatio
from dilatant.report.printed_parts import print_parts
from dilatant.report.say import print_line
from dilatant.report.step_comparison import Prediction, comparison_section
from dilatant.report.text.gantt_summary import data_waits, losses, measurement, pace, work_of
from dilatant.report.text.gantt_tables import cause_tones, idle_section, stage_name, timeline_parts
from dilatant.report.text.plan_summary import explain, suggest, summarize
from dilatant.report.text.wording import (
    bytes_text,
    count_text,
    counted,
    listed,
    lost_to,
    percent_text,
    ranks_text,
    seconds_text,
    unbroken,
)  # fmt: skip
from dilatant.schedule.schedule import DataWait, MeasuredAction


def write_plan_page(report: PlanReport, path: str | Path) -> Path:
    """Write the page to `path` and return the path."""
    return write_page(path, render_plan_page(report))


def render_plan_page(report: PlanReport) -> Page:
    """Return the page as text. Values from the report are escaped; only the page's own script may run in it."""
    charts = _charts(report)
    longest = max(chart.seconds for chart in charts.values())
    return render(
        f"{report.title} · Dilatant plan",
        report.title,
        f"{report.hardware} · schedule {_schedule(report)} · costs {report.cost_source}",
        [*plan_parts(report), *_framework(report)],
        _footer(report),
        [pack_chart(chart, report.plan, title, longest) for title, chart in charts.items()],
    )


def print_plan(report: PlanReport, console: Console) -> None:
    """Print what the page says."""
    about = f"  {report.hardware}, {_schedule(report)}, costs {report.cost_source}"
    print_line(console, (report.title, "bold"), (about, "dim"))
    print_parts(console, plan_parts(report))


def plan_parts(report: PlanReport) -> list[Part]:
    """Return all that the page and the terminal show, in order."""
    charts = _charts(report)
    causes = [cause for chart in (report.timeline, *charts.values()) for cause in chart.idle_fractions()]
    compared = [cause for candidate in report.candidates for cause in candidate.idle]
    tones = cause_tones(report.plan, [*causes, *compared])
    sentences, advice = (map(unbroken, texts) for texts in (summarize(report), suggest(report)))
    sections: list[Part] = []
    if report.measured is not None and report.remodelled is not None:
        note = f"Costs {report.cost_source}, without the summing of gradients."
        sections = [comparison_section(report.remodelled, report.measured, report.plan, tones, note)]
    sections += [*timeline_parts(charts, report.plan), idle_section(report.timeline, report.plan, tones)]
    last = _memory(report), _candidates(report, tones), _searched(report), *_why_not(report), _devices(report)
    return [
        _tiles(report),
        ("warnings", report.warnings),
        summary(sentences, advice=[*advice]),
        ("section", _model(report)),
        ("section", _data(report)),
        *sections,
        *(("section", one) for one in last),
    ]


def _charts(report: PlanReport) -> dict[str, GanttChart]:
    if report.measured is None or report.remodelled is None:
        return {"The timeline of a typical step": report.timeline}
    return {"The step as predicted": report.remodelled, "The step as measured": report.measured}


def _schedule(report: PlanReport) -> str:
    shard = "".join(f", {unit}: {how} sharded" for unit, how in report.shard.items())
    return report.schedule + (f", zero {report.zero}" if report.zero else "") + shard


def _tiles(report: PlanReport) -> Part:
    exchanges = "" if len(work_of(report.plan)) == 1 else " or exchanges"
    entries = [
        (seconds_text(report.step_seconds), f"a step of {report.global_batch:,} samples", ""),
        (count_text(report.samples_per_second), "samples per second", ""),
        (percent_text(report.timeline.busy_fraction()), f"of device time computes{exchanges}", ""),
        (f"{len(report.plan.ranks):,}", "devices", ""),
    ]
    if report.memory:
        fullest = max(use.fraction for use in report.memory)
        tone = "bad" if fullest > 1.0 else ""
        entries.append((percent_text(fullest), "of memory on the fullest device", tone))
    if report.proven:
        entries.append(("proven", "the fastest of what was searched", "good"))
    elif report.lower_bound_seconds:
        gap = max(report.step_seconds / report.lower_bound_seconds - 1.0, 0.0)
        if gap <= 1.0:  # looser bounds are useless
            entries.append((f"≤ {percent_text(gap)}", "above the lower bound of the search", ""))
    return tiles(entries)


def _model(report: PlanReport) -> PageSection:
    notes = [
        "A box is a stage with its layers; the filled part is how much of the step it computes. Replicas that are cut "
        "alike are drawn once."
    ]
    if any(unit.trainable_parameters == 0 for unit in report.units):
        notes.append("A dashed frame marks a frozen unit.")
    if any(len(placed) > 1 for placed in report.plan.stages_of_rank.values()):
        notes.append("Dashed boxes share their devices with another unit.")
    notes += [f"{line[0].upper()}{line[1:]}." for line in report.limits]
    graph: Part = "graph", model_graph(report)
    return PageSection("graph", "The model on the devices", " ".join(notes), [graph], "graph")


def _data(report: PlanReport) -> PageSection:
    parts: list[Part] = []
    if report.sizes or report.ratio:
        parts.append(("charts", [_histogram(report, sizes) for sizes in report.sizes]))
    if report.ratio:
        parts.append(("table", _shares(report, report.ratio)))
    return PageSection(
        "data",
        "The data it was planned for",
        "How many tokens a sample brings to each unit. The wider these spread, the more microbatches must be balanced.",
        parts,
    )


def _histogram(report: PlanReport, sizes: SizeDistribution) -> dict[str, Any]:
    names = [unit.name for unit in report.plan.units]
    text = (
        f"{sizes.samples:,} samples: mean {count_text(sizes.mean)} tokens, median {count_text(sizes.median)}, "
        f"95 % below {count_text(sizes.p95)}, largest {count_text(sizes.largest)}"
    )
    return {
        **histogram(sizes.edges, sizes.counts, {"median": sizes.median, "95 %": sizes.p95}),
        "title": sizes.unit,
        "label": text,
        "hue": (names.index(sizes.unit) if sizes.unit in names else len(names)) % HUES,
        "facts": {},
        "text": text,
        "sentence": "",
    }


def _shares(report: PlanReport, ratio: WorkloadRatio) -> Table:
    devices = {
        unit.name: len({rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks})
        for unit in report.plan.units
    }
    total = len(report.plan.ranks)
    shared = ", shared" if sum(devices.values()) > total else ""
    rows, hues = [], []
    for index, unit in enumerate(report.plan.units):
        if unit.name in ratio.shares:
            work, low, high = (of[unit.name] for of in (ratio.shares, ratio.low, ratio.high))
            mark = 100 * low, 100 * high - 100 * low
            part = devices[unit.name] / total
            hues.append(f"u{index % HUES}")
            rows.append(
                (
                    unit.name, plain_bar(work, "shade B", interval=mark), percent_text(work),
                    plain_bar(part, "shade F"), percent_text(part) + shared,
                )
            )  # fmt: skip
    caption = (
        f"Shares of single samples' work and of devices. Black marks: the {percent_text(ratio.confidence)} confidence "
        f"interval from {ratio.samples:,} samples"
    )
    if ratio.stable_batch is not None and ratio.stable_batch <= 1:
        caption += "; a batch of any size keeps the division of devices"
    elif ratio.stable_batch is not None:
        steady = "large enough" if ratio.global_batch >= ratio.stable_batch else "smaller than that"
        caption += (
            f"; batches of {ratio.stable_batch:,} samples or more keep the division of devices, "
            f"and the global batch of {ratio.global_batch:,} is {steady}"
        )
    columns = (
        Column("Unit"), Column("Work", "wide"), number("share", "work"), Column("Devices", "wide"),
        number("share", "devices"),
    )  # fmt: skip
    return Table(columns, rows, row_styles=hues, caption=f"{caption}.")


def _memory(report: PlanReport) -> PageSection:
    stages, uses = (report.plan.stages(), list(dict.fromkeys(n for use in report.memory for n in use.bytes_by_use)))
    fullest: dict[str, MemoryUse] = {}
    for use in report.memory:
        name = stage_name([stages[index] for index in use.stages])
        if name not in fullest or use.fraction > fullest[name].fraction:
            fullest[name] = use
    tones = {use: f"m{order % HUES}" for order, use in enumerate(uses)}
    rows = []
    for name, use in fullest.items():
        scale, over = max(use.capacity_bytes, use.peak_bytes) or 1, use.fraction > 1.0
        parts = [
            bar_part(part, count / scale, tones[part], bytes_text(count)) for part, count in use.bytes_by_use.items()
        ]
        rows.append(
            (
                f"{name}, {'ranks' if len(use.ranks) > 1 else 'rank'} {ranks_text(use.ranks)}",
                Cell(parts=parts, over=over),
                bytes_text(use.peak_bytes),
                bytes_text(use.capacity_bytes),
                Cell(percent_text(use.fraction), bad=over),
            )
        )
    columns = (Column("Stage"), Column("Use", "wide"), number("needs"), number("of"), number("full", ""))
    note = "Peak on the fullest rank of each stage; a full line is the device's capacity."
    table = Table(columns, rows, legend=legend(tones), most=12, more="more stages")
    return PageSection("memory", "Memory", note, [("table", table)] if rows else ())


def _candidates(report: PlanReport, tones: dict[str, str]) -> PageSection:
    slowest = max((candidate.step_seconds for candidate in report.candidates), default=0.0) or 1.0
    rows = []
    for one in report.ranked:
        length, relative = one.step_seconds / slowest, one.step_seconds / report.chosen.step_seconds - 1.0
        busy = max(1.0 - sum(one.idle.values()), 0.0)
        parts = [bar_part("computes", busy * length, "shade other", percent_text(busy))]
        parts += [
            bar_part(lost_to(cause), part * length, tones[cause], percent_text(part))
            for cause, part in one.idle.items()
        ]
        rows.append(
            (
                Cell(one.name, notes=[one.layout]),
                explain(one, report.chosen),
                f"{one.devices:,}",
                Cell(parts=parts),
                seconds_text(one.step_seconds),
                "" if one.chosen else f"{100 * relative:+.1f} %",
                Cell(percent_text(one.peak_memory), bad=one.peak_memory > 1.0),
            )
        )
    columns = (
        Column("Plan"), Column("Why", "text"), number("devices"), Column("Step", "text"), number("seconds", "step"),
        number("against ours"), number("memory"),
    )  # fmt: skip
    styles = ["chosen" if one.chosen else "" for one in report.ranked]
    parts_shown: list[Part] = [("list", ("reasons", report.reasons))] if report.reasons else []
    if rows:
        parts_shown.append(("table", Table(columns, rows, "plans stack", styles)))
    note = "All timed by the same simulation on the same samples."
    return PageSection("plans", "This plan and the runners-up", note, parts_shown)


def _searched(report: PlanReport) -> PageSection:
    rows = [
        (
            group.name,
            f"{group.candidates:,}",
            f"{group.simulated:,}" + (f", {group.overflowed:,} too large" if group.overflowed else ""),
            f"{group.cut:,}",
            f"{group.left:,}",
            seconds_text(group.bound_seconds),
            "" if group.step_seconds is None else seconds_text(group.step_seconds),
        )
        for group in report.groups
    ]
    figures = ("candidates", "simulated", "cut off", "left", "least bound", "fastest")
    table = Table((Column("Shape"), *map(number, figures)), rows, most=24, more="more shapes are in report.json.")
    note = "Cut off: no schedule of such a plan can beat this one. Left: others promised more by their closed form."
    return PageSection("searched", "What was searched", note, [("table", table)] if rows else (), in_terminal=False)


def _why_not(report: PlanReport) -> list[PageSection]:
    return [
        PageSection(f"why-{index}", f"Why not {one.asked}?", parts=[("list", ("reasons", one.answer))])
        for index, one in enumerate(report.why_not, 1)
    ]


def _framework(report: PlanReport) -> list[Part]:
    """Return the plan for another framework, which the command prints in lines that can be copied."""
    if (other := report.framework) is None:
        return []
    lines = tuple(filter(None, [other.models, *other.sentences, other.command]))
    return [("section", PageSection("framework", f"For {other.name}", parts=[("list", ("reasons", lines))]))]


def _devices(report: PlanReport) -> PageSection:
    """Return, node by node, the stages of its ranks, grouped by the network port that they use."""
    held = report.plan.stages_of_rank
    rows = []
    for name_of_node, first, per_node, ports in _nodes(report, max(held, default=0)):
        by_port: dict[int, dict[str, list[int]]] = {}
        for place in range(per_node):
            rank = first + place
            if rank in held:
                port = place * ports // per_node
                name = f"{stage_name(held[rank])} of replica {held[rank][-1].replica}"
                by_port.setdefault(port, {}).setdefault(name, []).append(rank)
        for port, names in by_port.items():
            text = "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in names.items())
            rows.append((name_of_node, str(port), text))
    columns = (Column("Node"), number("port"), Column("Ranks", "text"))
    table = Table(columns, rows, most=32, more="more lines are left out; plan.json has all ranks.")
    note = "What each node's ranks hold, in order, and the network port through which they reach other nodes."
    shown: list[Part] = [("table", table)] if report.gpus_per_node and rows else []
    return PageSection("ranks", "Ranks, nodes and ports", note, shown, in_terminal=False)


def _nodes(report: PlanReport, last: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, first rank, devices, ports) of each node up to that of rank `last`."""
    equal = DeviceGroup("", "", last + 1, report.gpus_per_node or 1, report.ports_per_node)
    first = node = 0
    for group in report.device_groups or (equal,):
        for _ in range(group.nodes):
            if first <= last:
                name = f"{node} ({group.name})" if group.name else str(node)
                yield name, first, group.gpus_per_node, group.ports
            first, node = first + group.gpus_per_node, node + 1


def _footer(report: PlanReport) -> str:
    facts = [f"{len(report.timeline.rows):,} actions on {len(report.timeline.lanes):,} lines"]
    if report.planning_seconds is not None:
        facts.append(f"planned in {seconds_text(report.planning_seconds)}")
    return f"Predicted by simulation: {listed(facts)}."


def render_step_page(
    actions: Sequence[MeasuredAction],
    plan: Plan,
    title: str,
    prediction: Prediction | None = None,
    waits: Sequence[DataWait] = (),
) -> str:
    """Return the page as text; all values are escaped. Raises ValueError without actions."""
    measured = measured_chart(actions, plan, waits)
    computed = measured_chart(actions, plan)  # predictions exclude waits for data
    predicted = None if prediction is None else predicted_chart(prediction.timeline)
    charts = {"Who computed what, when": measured}
    if predicted is not None:
        charts = {"The step as predicted": predicted, "The step as measured": measured}
    tones = cause_tones(plan, [cause for chart in charts.values() for cause in chart.idle_fractions()])
    samples = {sample for one in actions for sample in one.samples}
    microbatches = {(one.unit, one.action.stage, one.action.microbatch) for one in actions}
    most = max(sum(1 for _, stage, _ in microbatches if stage == placed.index) for placed in plan.stages())
    sentences = [losses(measured, plan), *data_waits(waits, measured.seconds), *pace(measured, plan)]
    if predicted is not None:
        sentences = [*measurement(predicted, computed, plan), *sentences]
    longest = max(chart.seconds for chart in charts.values())
    parts = [summary(map(unbroken, sentences))]
    if predicted is not None and prediction is not None:
        note = f"By costs {prediction.origin}, without the summing of gradients."
        parts.append(comparison_section(predicted, computed, plan, tones, note))
    return render(
        f"{title} · Dilatant timeline",
        title,
        f"{seconds_text(measured.seconds)} for {counted(len(samples), 'sample')} in "
        f"{counted(most, 'microbatch')} on {counted(len(plan.ranks), 'rank')}",
        [*parts, *timeline_parts(charts, plan), idle_section(measured, plan, tones)],
        "Measured, every action on every rank.",
        [pack_chart(chart, plan, name, longest) for name, chart in charts.items()],
    )
