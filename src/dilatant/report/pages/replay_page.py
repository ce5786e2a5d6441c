"""Replays of a node trace, as terminal tables and as a page: throughput over time and lost time by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dilatant.plan.replay.replay import (
    COPYING,
    RECONFIGURING,
    RESTARTING,
    ROLLED_BACK,
    SAVING,
    TOO_FEW,
    UNFINISHED,
    Replay,
)
from dilatant.report.pages.page import render
from dilatant.report.parts import HUES, Cell, Column, PageSection, Part, Table, bar_part, legend, number, summary
from dilatant.report.text.wording import count_text, percent_text, seconds_text

_WIDTH, _HEIGHT, _LEFT, _NODES = 1100.0, 210.0, 64.0, 70.0
_CAUSES = (RECONFIGURING, COPYING, RESTARTING, UNFINISHED, ROLLED_BACK, SAVING, TOO_FEW)
TONES: Mapping[str, str] = {cause: f"lost{order}" for order, cause in enumerate(_CAUSES)}
"""Cause of lost time → its colour, on every page."""


def replays_to_plain(replays: Sequence[Replay], setting: Sequence[str]) -> dict[str, Any]:
    """Return the output of `--json`: what was replayed, and every replay with its rate, its segments unchanged."""
    return {
        "setting": list(setting),
        "replays": [{**msgspec.to_builtins(one), "samples_per_second": one.samples_per_second} for one in replays],
    }


def summarize_replays(replays: Sequence[Replay]) -> tuple[str, ...]:
    """Return sentences on the first replay, and a comparison with the others."""
    ours = replays[0]
    lost = sum(ours.lost.values())
    useful = 1.0 - lost / ours.seconds if ours.seconds else 0.0
    sentences = [
        f"Over {seconds_text(ours.seconds)} the cluster changed {ours.changes:,} times; "
        f"{ours.name} trained {count_text(ours.samples_per_second)} samples per second on average "
        f"and computed for {percent_text(useful)} of the time."
    ]
    if ours.lost:
        cause, seconds = next(iter(ours.lost.items()))
        sentences.append(f"Most time was lost to {cause}: {seconds_text(seconds)}.")
    if ours.rollbacks:
        changes = "1 change" if ours.rollbacks == 1 else f"{ours.rollbacks:,} changes"
        sentences.append(f"{changes} cost finished steps: training fell back to a checkpoint.")
    if ours.exposed_seconds:
        part = percent_text(ours.exposed_seconds / ours.seconds)
        sentences.append(f"For {part} of the time there were fewer replicas than the fault tolerance asks for.")
    for other in replays[1:]:
        if other.samples_per_second > 0.0:
            factor = ours.samples_per_second / other.samples_per_second
            sentences.append(
                f"In the same time {other.name} trained {count_text(other.samples_per_second)} samples per second: "
                f"{ours.name} trained {factor:.2f} times as many."
            )
        else:
            sentences.append(f"{other.name[0].upper()}{other.name[1:]} would not have finished a step.")
    return tuple(sentences)


def render_replay_page(replays: Sequence[Replay], title: str, setting: Sequence[str]) -> str:
    """Return the page as text: the first replay against the others over time, and lost time by cause. setting:
    sentences on what was replayed, and on the assumed costs of changes of membership."""
    trace = replays[0].trace
    return render(
        f"{title}, through {trace} · Dilatant replay",
        title,
        f"Training while nodes come and go as trace {trace} says, simulated",
        replay_parts(replays, setting),
        "Simulated, not measured.",
    )


def replay_parts(replays: Sequence[Replay], setting: Sequence[str]) -> list[Part]:
    """Return all that the page and the terminal show, in order."""
    causes = dict.fromkeys(cause for one in replays for cause in one.lost)
    totals = {cause: sum(one.lost.get(cause, 0.0) for one in replays) for cause in causes}
    tones = {cause: TONES[cause] for cause in sorted(causes, key=lambda cause: -totals[cause])}
    rows = []
    for order, one in enumerate(replays):
        whole = one.seconds or 1.0
        useful = max(one.seconds - sum(one.lost.values()), 0.0)
        parts = [bar_part("training", useful / whole, f"shade u{order % HUES} B", seconds_text(useful))]
        parts += [
            bar_part(cause, one.lost[cause] / whole, tone, seconds_text(one.lost[cause]))
            for cause, tone in tones.items()
            if cause in one.lost
        ]
        trains = percent_text(useful / one.seconds) if one.seconds else ""
        rows.append((one.name, Cell(parts=parts), trains, count_text(one.samples_per_second)))
    columns = (Column("Run"), Column("Time", "wide"), number("trains"), number("samples/s"))
    note = "Samples per second between two changes of the cluster, and below the nodes that are alive."
    lost = Table(columns, rows, legend=legend(tones))
    return [
        summary(summarize_replays(replays)),
        summary(setting, "What was replayed, and what was assumed"),
        ("section", PageSection("rate", "Throughput over time", note, [("throughput", _chart(replays))], "replay")),
        ("section", PageSection("lost", "What time was lost to", parts=[("table", lost)])),
    ]


def binned(one: Replay, area: list[float], bins: int = 60) -> list[float]:
    """Return averages over `bins` equal spans of time; `area[i]` is the total of segment i."""
    if not one.segments:
        return []
    start, span = one.segments[0].start, one.seconds / bins
    totals = [0.0] * bins
    for segment, amount in zip(one.segments, area):
        first, end = (segment.start - start) / span, (segment.start + segment.seconds - start) / span
        for index in range(int(first), min(int(end) + 1, bins)):
            common = min(end, index + 1) - max(first, index)
            totals[index] += amount * max(common, 0.0) * span / segment.seconds
    return [amount / span for amount in totals]


def _line(name: str, heights: list[float], text: str) -> dict[str, Any]:
    return {"name": name, "title": name, "heights": heights, "facts": {}, "sentence": "", "text": text}


def _chart(replays: Sequence[Replay]) -> dict[str, Any]:
    """Return step lines of throughput, and below them the nodes alive."""
    start, seconds = replays[0].segments[0].start, replays[0].seconds or 1.0
    rates = [part.samples / part.seconds for one in replays for part in one.segments]
    top = max(rates, default=0.0) or 1.0
    most = max((part.nodes for part in replays[0].segments), default=1) or 1

    def x(moment: float) -> float:
        return _LEFT + (moment - start) / seconds * (_WIDTH - _LEFT)

    def steps(one: Replay, value: Any, floor: float, height: float) -> str:
        points = []
        for part in one.segments:
            y = floor - height * value(part)
            points.append(f"{x(part.start):.1f},{y:.1f} {x(part.start + part.seconds):.1f},{y:.1f}")
        return " ".join(points)

    sums = [[part.samples for part in one.segments] for one in replays]
    alive = [part.nodes * part.seconds for part in replays[0].segments]
    base = _HEIGHT + 26 + _NODES
    area = steps(replays[0], lambda part: part.nodes / most, base, _NODES)
    return {
        "width": _WIDTH,
        "height": base + 24,
        "left": _LEFT,
        "floor": _HEIGHT,
        "base": base,
        "lines": [
            {
                "tone": f"u{order % HUES} B",
                **_line(one.name, binned(one, sums[order]), f"{count_text(one.samples_per_second)} samples/s"),
                "points": steps(one, lambda part: part.samples / part.seconds / top, _HEIGHT, _HEIGHT - 14),
            }
            for order, one in reversed(list(enumerate(replays)))
        ],
        "legend": legend({one.name: f"shade u{order % HUES} B" for order, one in enumerate(replays)}),
        "nodes": f"{x(start):.1f},{base:.1f} {area} {x(start + seconds):.1f},{base:.1f}",
        "marks": [{"y": _HEIGHT - (_HEIGHT - 14) * part, "text": count_text(top * part)} for part in (0.0, 0.5, 1.0)],
        "most": most,
        "alive": _line("nodes alive", binned(replays[0], alive), f"up to {most}"),
        "ticks": [
            {"x": x(start + seconds * part), "text": seconds_text(seconds * part) if part else "0"}
            for part in (0.0, 0.25, 0.5, 0.75, 1.0)
        ],
    }
