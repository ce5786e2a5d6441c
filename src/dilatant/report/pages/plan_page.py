"""Plan page: a plan report as one HTML file that needs no network and opens from a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilatant.plan.plan import PlacedStage
from dilatant.report.pages.gantt_data import pack_chart
from dilatant.report.pages.model_graph import model_graph
from dilatant.report.pages.page import render, write_page
from dilatant.report.plan_report import ComparedPlan, DeviceGroup, PlanReport, SizeDistribution
from dilatant.report.step_comparison import comparison_rows
from dilatant.report.text.gantt_summary import work_of
from dilatant.report.text.gantt_tables import (
    HUES,
    action_legend,
    bar_part,
    cause_tones,
    idle_legend,
    idle_rows,
    stage_name,
)
from dilatant.report.text.plan_summary import explain, suggest, summarize
from dilatant.report.text.wording import (
    bytes_text,
    count_text,
    listed,
    lost_to,
    percent_text,
    ranks_text,
    seconds_text,
    unbroken,
)

_CHART = 480.0  # width of a histogram in figures.html


def write_plan_page(report: PlanReport, path: str | Path) -> Path:
    """Write the page to `path` and return the path."""
    return write_page(path, render_plan_page(report))


def render_plan_page(report: PlanReport) -> str:
    """Return the page as text. Values from the report are escaped; only the page's own script may run in it."""
    timelines = {"The timeline of a typical step": report.timeline}
    if report.measured is not None:
        timelines = {"The step as predicted": report.timeline, "The step as measured": report.measured}
    longest = max(timeline.seconds for timeline in timelines.values())
    causes = [cause for timeline in timelines.values() for cause in timeline.idle_fractions()]
    compared = [cause for candidate in report.candidates for cause in candidate.idle]
    tones = cause_tones(report.plan, [*causes, *compared])
    return render(
        "plan.html",
        [pack_chart(timeline, report.plan, title, longest) for title, timeline in timelines.items()],
        report=report,
        tiles=_tiles(report),
        summary=[unbroken(sentence) for sentence in summarize(report)],
        advice=[unbroken(sentence) for sentence in suggest(report)],
        model_graph=model_graph(report),
        graph_notes=_graph_notes(report),
        histograms=[_histogram(report, sizes) for sizes in report.sizes],
        ratio_rows=_ratio_rows(report),
        ratio_confidence=percent_text(report.ratio.confidence) if report.ratio else "",
        ratio_note=_ratio_note(report),
        comparison=None
        if report.measured is None
        else comparison_rows(report.timeline, report.measured, report.plan, tones),
        timeline_titles=list(timelines),
        action_legend=action_legend(report.plan, timelines.values()),
        idle_rows=idle_rows(report.timeline, report.plan, tones),
        idle_legend=idle_legend(tones),
        memory_rows=_memory_rows(report),
        memory_legend=[
            {"name": use, "tone": f"m{order % HUES}"} for order, use in enumerate(_memory_uses(report))
        ],
        candidate_rows=_candidate_rows(report, tones),
        group_rows=_group_rows(report),
        device_rows=_device_rows(report),
        footer=_footer(report),
    )


def _busy(report: PlanReport) -> str:
    return (
        "of device time computes"
        if len(work_of(report.plan)) == 1
        else "of device time computes or exchanges"
    )


def _tiles(report: PlanReport) -> list[dict[str, str]]:
    tiles = [
        (seconds_text(report.step_seconds), f"a step of {report.global_batch:,} samples", ""),
        (count_text(report.samples_per_second), "samples per second", ""),
        (percent_text(report.timeline.busy_fraction()), _busy(report), ""),
        (f"{len(report.plan.ranks):,}", "devices", ""),
    ]
    if report.memory:
        fullest = max(use.fraction for use in report.memory)
        tone = "bad" if fullest > 1.0 else ""
        tiles.append((percent_text(fullest), "of memory on the fullest device", tone))
    if report.proven:
        tiles.append(("proven", "the fastest of what was searched", "good"))
    elif report.lower_bound_seconds:
        gap = max(report.step_seconds / report.lower_bound_seconds - 1.0, 0.0)
        if gap <= 1.0:  # looser bounds are useless
            tiles.append((f"≤ {percent_text(gap)}", "above the best that was searched", ""))
    return [{"value": value, "label": label, "tone": tone} for value, label, tone in tiles]


def _graph_notes(report: PlanReport) -> str:
    notes = []
    if any(unit.trainable_parameters == 0 for unit in report.units):
        notes.append("A dashed frame marks a frozen unit.")
    users: dict[int, int] = {}
    for placed in report.plan.stages():
        for rank in placed.stage.ranks:
            users[rank] = users.get(rank, 0) + 1
    if any(count > 1 for count in users.values()):
        notes.append("Dashed boxes share their devices with another unit.")
    return " ".join(notes)


def _histogram(report: PlanReport, sizes: SizeDistribution) -> dict[str, Any]:
    low, high = sizes.edges[0], sizes.edges[-1]
    span = (high - low) or 1.0
    tallest = max(sizes.counts, default=0) or 1
    bars = []
    for left, right, count in zip(sizes.edges, sizes.edges[1:], sizes.counts):
        x, width = _CHART * (left - low) / span, _CHART * (right - left) / span
        height = 92 * count / tallest
        title = f"{left:,.0f} to {right:,.0f} tokens: {count:,} samples"
        bars.append(
            {"x": x, "y": 110 - height, "width": max(width - 1, 0.5), "height": height, "title": title}
        )
    marks = []
    for name, value, top in (("median", sizes.median, 2), ("95 %", sizes.p95, 14)):
        x = _CHART * (value - low) / span
        right = x < _CHART - 60
        marks.append(
            {
                "name": name,
                "x": x,
                "top": top,
                "shift": 4 if right else -4,
                "anchor": "start" if right else "end",
            }
        )
    unit = report.plan.units
    return {
        "unit": sizes.unit,
        "index": next((index for index, one in enumerate(unit) if one.name == sizes.unit), len(unit)),
        "bars": bars,
        "marks": marks,
        "low": count_text(low),
        "high": count_text(high),
        "text": f"{sizes.samples:,} samples: mean {count_text(sizes.mean)} tokens, median {count_text(sizes.median)}, "
        f"95 % below {count_text(sizes.p95)}, largest {count_text(sizes.largest)}",
    }


def _ratio_rows(report: PlanReport) -> list[dict[str, Any]]:
    ratio = report.ratio
    if ratio is None:
        return []
    devices = {
        unit.name: len(
            {rank for replica in unit.replicas for stage in replica.stages for rank in stage.ranks}
        )
        for unit in report.plan.units
    }
    total = len(report.plan.ranks)
    shared = sum(devices.values()) > total
    return [
        {
            "index": index,
            "unit": unit.name,
            "work": 100 * ratio.shares[unit.name],
            "low": 100 * ratio.low[unit.name],
            "high": 100 * ratio.high[unit.name],
            "work_text": percent_text(ratio.shares[unit.name]),
            "devices": 100 * devices[unit.name] / total,
            "devices_text": percent_text(devices[unit.name] / total) + (", shared" if shared else ""),
        }
        for index, unit in enumerate(report.plan.units)
        if unit.name in ratio.shares
    ]


def _ratio_note(report: PlanReport) -> str:
    ratio = report.ratio
    if ratio is None or ratio.stable_batch is None:
        return ""
    if ratio.stable_batch <= 1:
        return "; a batch of any size keeps the division of devices"
    steady = "large enough" if ratio.global_batch >= ratio.stable_batch else "smaller than that"
    return (
        f"; batches of {ratio.stable_batch:,} samples or more keep the division of devices, "
        f"and the global batch of {ratio.global_batch:,} is {steady}"
    )


def _memory_uses(report: PlanReport) -> list[str]:
    return list(dict.fromkeys(name for use in report.memory for name in use.bytes_by_use))


def _memory_rows(report: PlanReport) -> list[dict[str, Any]]:
    stages, uses = report.plan.stages(), _memory_uses(report)
    fullest: dict[str, Any] = {}
    for use in report.memory:
        name = stage_name([stages[index] for index in use.stages])
        if name not in fullest or use.fraction > fullest[name].fraction:
            fullest[name] = use
    rows = []
    for name, use in fullest.items():
        scale = max(use.capacity_bytes, use.peak_bytes) or 1
        rows.append(
            {
                "name": f"{name}, {'ranks' if len(use.ranks) > 1 else 'rank'} {ranks_text(use.ranks)}",
                "parts": [
                    bar_part(part, count / scale, f"m{uses.index(part) % HUES}", bytes_text(count))
                    for part, count in use.bytes_by_use.items()
                ],
                "need": bytes_text(use.peak_bytes),
                "capacity": bytes_text(use.capacity_bytes),
                "full": percent_text(use.fraction),
                "over": use.fraction > 1.0,
            }
        )
    return rows


def _candidate_rows(report: PlanReport, tones: dict[str, str]) -> list[dict[str, Any]]:
    if not report.candidates:
        return []
    chosen = report.chosen
    slowest = max(candidate.step_seconds for candidate in report.candidates) or 1.0

    def parts(candidate: ComparedPlan) -> list[dict[str, Any]]:
        length = candidate.step_seconds / slowest
        busy = max(1.0 - sum(candidate.idle.values()), 0.0)
        lost = [
            bar_part(lost_to(cause), part * length, tones[cause], percent_text(part))
            for cause, part in candidate.idle.items()
        ]
        return [bar_part("computes", busy * length, "shade other", percent_text(busy)), *lost]

    return [
        {
            "name": candidate.name,
            "layout": candidate.layout,
            "devices": f"{candidate.devices:,}",
            "parts": parts(candidate),
            "seconds": seconds_text(candidate.step_seconds),
            "relative": ""
            if candidate.chosen
            else f"{100 * (candidate.step_seconds / chosen.step_seconds - 1):+.1f} %",
            "memory": percent_text(candidate.peak_memory),
            "over": candidate.peak_memory > 1.0,
            "chosen": candidate.chosen,
            "why": explain(candidate, chosen),
        }
        for candidate in report.ranked
    ]


def _group_rows(report: PlanReport) -> list[dict[str, str]]:
    return [
        {
            "name": group.name,
            "candidates": f"{group.candidates:,}",
            "simulated": f"{group.simulated:,}"
            + (f", {group.overflowed:,} too large" if group.overflowed else ""),
            "cut": f"{group.cut:,}",
            "left": f"{group.left:,}",
            "bound": seconds_text(group.bound_seconds),
            "seconds": "" if group.step_seconds is None else seconds_text(group.step_seconds),
        }
        for group in report.groups
    ]


def _device_rows(report: PlanReport) -> list[dict[str, str]]:
    """Return, node by node, the stages of its ranks, grouped by the network port that they use."""
    if not report.gpus_per_node:
        return []
    stages = report.plan.stages()
    held: dict[int, list[PlacedStage]] = {}
    for placed in stages:
        for rank in placed.stage.ranks:
            held.setdefault(rank, []).append(placed)
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
            rows.append({"node": name_of_node, "port": str(port), "ranks": text})
    return rows


def _nodes(report: PlanReport, last: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, first rank, devices, ports) of each node up to that of rank `last`."""
    equal = DeviceGroup("", "", last + 1, report.gpus_per_node or 1, report.ports_per_node)
    first = node = 0
    for group in report.device_groups or (equal,):
        for _ in range(group.nodes):
            if first <= last:
                yield (
                    f"{node} ({group.name})" if group.name else str(node),
                    first,
                    group.gpus_per_node,
                    group.ports,
                )
            first, node = first + group.gpus_per_node, node + 1


def _footer(report: PlanReport) -> str:
    facts = [f"{len(report.timeline.rows):,} actions on {len(report.timeline.lanes):,} lines"]
    if report.planning_seconds is not None:
        facts.append(f"planned in {seconds_text(report.planning_seconds)}")
    return f"Predicted by simulation: {listed(facts)}."
