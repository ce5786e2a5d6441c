"""The plan page: a plan report as one HTML file that needs no network and opens from a disk."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from dilatant.report.model_graph import model_graph
from dilatant.report.page import asset, template
from dilatant.report.plan_report import Candidate, PlanReport, SizeDistribution
from dilatant.report.plan_summary import explain, lost_to, suggest, summarize
from dilatant.report.timeline_data import pack_timeline
from dilatant.report.wording import bytes_text, count_text, listed, percent_text, ranks_text, seconds_text

_ACTIONS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_SCRIPTS = ("timeline_tree.js", "timeline_paint.js", "timeline.js", "page.js")
_CHART = 480.0  # width of a histogram in figures.html
_HUES = 6  # as many as page.css has for units and for causes


def write_plan_page(report: PlanReport, path: str | Path) -> Path:
    """Write the page to `path` and return it."""
    path = Path(path)
    path.write_text(render_plan_page(report), encoding="utf-8")
    return path


def render_plan_page(report: PlanReport) -> str:
    """The page as text. Everything from the report is escaped; no script but the page's own may run in it."""
    from markupsafe import Markup

    timelines = {"The timeline of a typical step": report.timeline}
    if report.measured is not None:
        timelines = {"The step as predicted": report.timeline, "The step as measured": report.measured}
    script = "\n".join(asset(name) for name in _SCRIPTS)
    tones = _cause_tones(report)
    packed = [pack_timeline(timeline, report.plan, title) for title, timeline in timelines.items()]
    return template("plan.html").render(
        report=report,
        tiles=_tiles(report),
        summary=[_unbroken(sentence) for sentence in summarize(report)],
        advice=[_unbroken(sentence) for sentence in suggest(report)],
        model_graph=model_graph(report),
        graph_notes=_graph_notes(report),
        histograms=[_histogram(report, sizes) for sizes in report.sizes],
        ratio_rows=_ratio_rows(report),
        ratio_confidence=percent_text(report.ratio.confidence) if report.ratio else "",
        ratio_note=_ratio_note(report),
        timeline_titles=list(timelines),
        action_legend=_action_legend(report),
        idle_rows=_idle_rows(report, tones),
        idle_legend=[{"name": lost_to(cause), "tone": tone} for cause, tone in tones.items()]
        + [{"name": "waiting", "tone": "idle"}] * (not tones),
        memory_rows=_memory_rows(report),
        memory_legend=[
            {"name": use, "tone": f"m{order % _HUES}"} for order, use in enumerate(_memory_uses(report))
        ],
        candidate_rows=_candidate_rows(report, tones),
        footer=_footer(report),
        style=Markup(asset("page.css")),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data=Markup(_script_safe({"timelines": packed})),
    )


def _unbroken(sentence: str) -> str:
    """The sentence with figures tied to their units, so that no line ends between them."""
    return re.sub(r"(?<=\d) (?=%|[KMGT]iB|[mµ]?s\b|min\b|h\b)", "\u00a0", sentence)


def _script_safe(value: Any) -> str:
    """JSON that cannot end the script element it stands in, and that is valid in any JavaScript."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tiles(report: PlanReport) -> list[dict[str, str]]:
    tiles = [
        (seconds_text(report.step_seconds), f"a step of {report.global_batch:,} samples", ""),
        (count_text(report.samples_per_second), "samples per second", ""),
        (percent_text(report.timeline.busy_fraction()), "of device time computes", ""),
        (f"{len(report.plan.ranks):,}", "devices", ""),
    ]
    if report.memory:
        fullest = max(use.fraction for use in report.memory)
        tone = "bad" if fullest > 1.0 else ""
        tiles.append((percent_text(fullest), "of memory on the fullest device", tone))
    if report.proven:
        tiles.append(("proven", "no faster plan is allowed", "good"))
    elif report.lower_bound_seconds:
        gap = max(report.step_seconds / report.lower_bound_seconds - 1.0, 0.0)
        tiles.append((f"≤ {percent_text(gap)}", "above the best possible", ""))
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
    total = sum(devices.values())
    return [
        {
            "index": index,
            "unit": unit.name,
            "work": 100 * ratio.shares[unit.name],
            "low": 100 * ratio.low[unit.name],
            "high": 100 * ratio.high[unit.name],
            "work_text": percent_text(ratio.shares[unit.name]),
            "devices": 100 * devices[unit.name] / total,
            "devices_text": percent_text(devices[unit.name] / total),
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


def _action_legend(report: PlanReport) -> list[dict[str, str]]:
    stages = report.plan.stages()
    units = [unit.name for unit in report.plan.units]
    rows = report.timeline.rows + (report.measured.rows if report.measured else ())
    seen = {(units.index(stages[row.stage].unit) if row.stage >= 0 else len(units), row.kind) for row in rows}
    entries = []
    for unit, kind in sorted(seen, key=lambda pair: _shade_order(*pair)):
        shade = kind if kind in _ACTIONS else "other"
        name = f"{units[unit]} {_ACTIONS.get(kind, kind)}" if unit < len(units) else kind
        entries.append({"name": name, "tone": f"shade u{unit % _HUES} {shade}"})
    return [*entries, {"name": "idle", "tone": "idle"}]


def _shade_order(unit: int, kind: str) -> tuple[int, int]:
    return unit, list(_ACTIONS).index(kind) if kind in _ACTIONS else len(_ACTIONS)


def _cause_tones(report: PlanReport) -> dict[str, str]:
    """A colour for every cause of idle time; waiting for a unit takes the unit's hue."""
    units = [unit.name for unit in report.plan.units]
    causes = dict.fromkeys(report.timeline.idle_fractions())
    causes |= dict.fromkeys(cause for candidate in report.candidates for cause in candidate.idle)
    tones: dict[str, str] = {}
    for cause in causes:
        awaited = cause.removeprefix("waiting for ")
        plain = sum(1 for tone in tones.values() if tone.startswith("c"))
        tones[cause] = f"wait u{units.index(awaited) % _HUES}" if awaited in units else f"c{plain % _HUES}"
    return tones


def _lanes_alike(report: PlanReport) -> dict[str, list[int]]:
    """Lanes by unit and position, over all replicas: what the tables show as one line."""
    stages = report.plan.stages()
    groups: dict[str, list[int]] = {}
    for number, lane in enumerate(report.timeline.lanes):
        groups.setdefault(_stage_name([stages[index] for index in lane.stages]), []).append(number)
    return groups


def _stage_name(placed: list[Any]) -> str:
    if not placed:
        return "other"
    return " + ".join(dict.fromkeys(f"{stage.unit} {stage.position}" for stage in placed))


def _idle_rows(report: PlanReport, tones: dict[str, str]) -> list[dict[str, Any]]:
    timeline, stages = report.timeline, report.plan.stages()
    units = [unit.name for unit in report.plan.units]
    time = timeline.seconds or 1.0
    work: list[dict[tuple[int, str], float]] = [{} for _ in timeline.lanes]
    for row in timeline.rows:
        unit = units.index(stages[row.stage].unit) if row.stage >= 0 else len(units)
        shade = row.kind if row.kind in _ACTIONS else "other"
        work[row.lane][unit, shade] = work[row.lane].get((unit, shade), 0.0) + row.seconds / time
    rows = []
    for name, lanes in _lanes_alike(report).items():
        parts = []
        busy: dict[tuple[int, str], float] = {}
        for lane in lanes:
            for key, part in work[lane].items():
                busy[key] = busy.get(key, 0.0) + part / len(lanes)
        for (unit, shade), part in sorted(busy.items(), key=lambda item: _shade_order(*item[0])):
            label = f"{units[unit]} {_ACTIONS.get(shade, shade)}" if unit < len(units) else "other work"
            parts.append(_part(label, part, f"shade u{unit % _HUES} {shade}"))
        lost = {
            cause: sum(timeline.idle[lane].get(cause, 0.0) for lane in lanes) / len(lanes) / time
            for cause in (timeline.idle_fractions() if timeline.idle else ())
        }
        parts += [_part(lost_to(cause), part, tones[cause]) for cause, part in lost.items() if part > 0.0]
        worst = max(lost, key=lambda cause: lost[cause], default="")
        rows.append(
            {
                "name": name + (f" (× {len(lanes)})" if len(lanes) > 1 else ""),
                "parts": parts,
                "busy": percent_text(sum(busy.values())),
                "loss": f"{lost_to(worst)}, {percent_text(lost[worst])}"
                if worst and lost[worst] >= 0.005
                else "",
            }
        )
    return rows


def _part(name: str, fraction: float, tone: str, text: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "percent": round(100 * fraction, 3),
        "tone": tone,
        "text": text or percent_text(fraction),
    }


def _memory_uses(report: PlanReport) -> list[str]:
    return list(dict.fromkeys(name for use in report.memory for name in use.bytes_by_use))


def _memory_rows(report: PlanReport) -> list[dict[str, Any]]:
    stages, uses = report.plan.stages(), _memory_uses(report)
    fullest: dict[str, Any] = {}
    for use in report.memory:
        name = _stage_name([stages[index] for index in use.stages])
        if name not in fullest or use.fraction > fullest[name].fraction:
            fullest[name] = use
    rows = []
    for name, use in fullest.items():
        scale = max(use.capacity_bytes, use.peak_bytes) or 1
        rows.append(
            {
                "name": f"{name}, {'ranks' if len(use.ranks) > 1 else 'rank'} {ranks_text(use.ranks)}",
                "parts": [
                    _part(part, count / scale, f"m{uses.index(part) % _HUES}", bytes_text(count))
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
    chosen = next((candidate for candidate in report.candidates if candidate.chosen), report.candidates[0])
    slowest = max(candidate.step_seconds for candidate in report.candidates) or 1.0

    def parts(candidate: Candidate) -> list[dict[str, Any]]:
        length = candidate.step_seconds / slowest
        busy = max(1.0 - sum(candidate.idle.values()), 0.0)
        lost = [
            _part(lost_to(cause), part * length, tones[cause], percent_text(part))
            for cause, part in candidate.idle.items()
        ]
        return [_part("computes", busy * length, "shade other", percent_text(busy)), *lost]

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
        for candidate in sorted(report.candidates, key=lambda one: (not one.chosen, one.step_seconds))
    ]


def _footer(report: PlanReport) -> str:
    facts = [f"{len(report.timeline.rows):,} actions on {len(report.timeline.lanes):,} lines"]
    if report.planning_seconds is not None:
        facts.append(f"planned in {seconds_text(report.planning_seconds)}")
    return f"Predicted by simulation: {listed(facts)}. Written by Dilatant."
