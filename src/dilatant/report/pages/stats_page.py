"""Stats page: a data report as one HTML file that needs no network and opens from a disk."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from dilatant.data.index.stats import JointHistogram, UnitRatio, UnitStats
from dilatant.data.sample import Example, ExampleSpan
from dilatant.report.pages.page import render, write_page
from dilatant.report.stats_report import StatsReport
from dilatant.report.text.gantt_tables import HUES
from dilatant.report.text.stats_table import constant_text, summarize_stats
from dilatant.report.text.wording import count_text, counted, percent_text, unbroken

_WIDTH, _HEIGHT, _LEFT, _TOP = 480.0, 150.0, 44.0, 14.0
_FOOT = 22.0
_WIDEST = 28.0
"""Maximum width of a bar: two distinct lengths appear as two bars, not as blocks."""
_LOWEST = 1.5
"""Minimum height of a bar: a single sample beside a thousand stays visible."""
_LONGEST_TEXT = 1_600
"""Maximum characters shown of one run of text."""
_MEDIA_SHOWN = 6


def write_stats_page(path: str | Path, report: StatsReport) -> Path:
    """Write the page to `path` and return the path."""
    return write_page(path, render_stats_page(report))


def render_stats_page(report: StatsReport) -> str:
    """Return the page as text; all values from the report are escaped."""
    stats = report.stats
    # Encoders come before the language model, as in a plan, so that a unit has one colour on every page.
    feeding, fed = stats.units[1:], stats.units[:1]
    order = [unit.unit for unit in (*feeding, *fed)]
    hues = {unit.unit: order.index(unit.unit) % HUES for unit in stats.units}
    joint = {one.unit: one for one in stats.joint}
    return render(
        "stats.html",
        title=report.title,
        subtitle=f"{counted(stats.samples, 'sample')} for {counted(len(stats.units), 'unit')}, measured without "
        "decoding media",
        tiles=_tiles(report),
        summary=[unbroken(sentence) for sentence in summarize_stats(report)],
        refusals=list(stats.refusals),
        refused=stats.refused,
        units=[_unit(unit, hues[unit.unit]) for unit in stats.units],
        ratios=[_ratio(ratio, hues, joint.get(ratio.unit)) for ratio in stats.ratios],
        mixes=[
            {"name": mix, "samples": f"{count:,}", "percent": 100 * count / max(stats.samples, 1)}
            for mix, count in stats.mixes.items()
        ],
        sources=_sources(report, hues),
        balance=_balance(report, hues),
        batch_size=report.batch_size,
        examples=[_example(one, hues) for one in report.examples],
    )


def _tiles(report: StatsReport) -> list[dict[str, str]]:
    stats = report.stats
    tiles = [(f"{stats.samples:,}", "samples", "")]
    tiles += [(count_text(unit.total), f"{unit.unit} tokens", "") for unit in stats.units]
    tiles += [(count_text(stats.target_tokens), "tokens that carry loss", "")]
    tiles += [
        (f"{stats.refused:,}", "samples that training would refuse", "bad" if stats.refused else "good")
    ]
    return [{"value": value, "label": label, "tone": tone} for value, label, tone in tiles]


def _unit(unit: UnitStats, hue: int) -> dict[str, Any]:
    facts = {
        "samples": f"{unit.samples:,}",
        "mean": count_text(unit.mean),
        **{f"{percent} %": count_text(value) for percent, value in unit.percentiles.items()},
        "largest": count_text(unit.maximum),
    }
    sentence = ""
    if not unit.samples:
        sentence = "no sample has any work here"
    elif unit.minimum == unit.maximum:
        sentence = constant_text(unit)
    return {
        "name": unit.unit,
        "hue": hue,
        "facts": facts,
        "sentence": f"{sentence[0].upper()}{sentence[1:]}." if sentence else "",
        "chart": None if sentence else _histogram(unit),
    }


def _histogram(unit: UnitStats) -> dict[str, Any]:
    """Return bars with both axes: marks at round numbers of samples and of tokens."""
    edges, counts = unit.histogram.edges, unit.histogram.counts
    top = _round_up(max(counts))
    x, y = _scale(edges[0], edges[-1], _LEFT, _WIDTH), _scale(0.0, top, _TOP + _HEIGHT, _TOP)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            wide = min(max(x(right) - x(left) - 1.0, 0.5), _WIDEST)
            bars.append(
                {
                    "x": round((x(left) + x(right) - wide) / 2, 2),
                    "width": wide,
                    "y": min(y(count), _TOP + _HEIGHT - _LOWEST),
                    "height": max(_TOP + _HEIGHT - y(count), _LOWEST),
                    "title": f"{_span_text(left, right)} tokens: {counted(count, 'sample')}",
                }
            )
    medians = [(50, "median"), (95, "95 %")]
    # A bin of width 1 stands for one number, which is marked at the middle of its bar.
    middle = 0.5 if edges[1] - edges[0] == 1.0 else 0.0
    last = edges[-1] - 2 * middle
    marks = [{"x": x(unit.percentiles[percent] + middle), "name": name} for percent, name in medians]
    return {
        **_frame(),
        "bars": bars,
        "marks": marks,
        "rows": [{"y": y(value), "text": count_text(value)} for value in _ticks(0.0, top)],
        "columns": [{"x": x(value + middle), "text": count_text(value)} for value in _ticks(edges[0], last)],
    }


def _ratio(ratio: UnitRatio, hues: dict[str, int], joint: JointHistogram | None) -> dict[str, Any]:
    correlation = ""
    if ratio.correlation is not None:
        correlation = f"{ratio.correlation:+.2f}".replace("-", "−")
    return {
        "unit": ratio.unit,
        "to": ratio.to,
        "hue": hues[ratio.unit],
        "ratio": f"{ratio.ratio:.3f}",
        "interval": f"{ratio.low:.3f} to {ratio.high:.3f}",
        "correlation": correlation,
        "chart": None if joint is None else _joint_chart(joint),
    }


def _joint_chart(joint: JointHistogram) -> dict[str, Any]:
    """Return samples by tokens of both units; darker cells have more samples."""
    x = _scale(joint.to_edges[0], joint.to_edges[-1], _LEFT, _WIDTH)
    y = _scale(joint.edges[0], joint.edges[-1], _TOP + _HEIGHT, _TOP)
    most = max(max(row) for row in joint.counts) or 1
    cells = []
    for column, row in enumerate(joint.counts):
        for bin_, count in enumerate(row):
            if not count:
                continue
            left, right = joint.to_edges[column : column + 2]
            low, high = joint.edges[bin_ : bin_ + 2]
            cells.append(
                {
                    "x": x(left),
                    "y": y(high),
                    "width": x(right) - x(left),
                    "height": y(low) - y(high),
                    "opacity": round(0.15 + 0.85 * (count / most) ** 0.5, 3),
                    "title": f"{_span_text(left, right)} {joint.to} tokens, {_span_text(low, high)} {joint.unit} "
                    f"tokens: {counted(count, 'sample')}",
                }
            )
    return {
        **_frame(),
        "cells": cells,
        "rows": [
            {"y": y(value), "text": count_text(value)}
            for value in _ticks(*joint.edges[:: len(joint.edges) - 1])
        ],
        "columns": [
            {"x": x(value), "text": count_text(value)}
            for value in _ticks(*joint.to_edges[:: len(joint.to_edges) - 1])
        ],
    }


def _sources(report: StatsReport, hues: dict[str, int]) -> list[dict[str, Any]]:
    """Return a line for each source of a blend; empty for a single source."""
    stats = report.stats
    if len(stats.sources) < 2:
        return []
    largest = {unit: max(source.tokens[unit] for source in stats.sources) or 1 for unit in hues}
    return [
        {
            "name": source.name,
            "samples": f"{source.samples:,}",
            "weight": f"{source.weight:g}",
            "refused": f"{source.refused:,}",
            "bad": source.refused > 0,
            "tokens": [
                {
                    "unit": unit,
                    "text": count_text(source.tokens[unit]),
                    "mean": count_text(source.tokens[unit] / max(source.samples, 1)),
                    "percent": 100 * source.tokens[unit] / largest[unit],
                    "hue": hue,
                }
                for unit, hue in hues.items()
            ],
        }
        for source in stats.sources
    ]


def _balance(report: StatsReport, hues: dict[str, int]) -> list[dict[str, Any]]:
    """Return lines for every number of groups: all devices together, then each unit alone."""
    rows = []
    found = {(one.groups, one.policy): one for one in report.balance}
    for groups in dict.fromkeys(one.groups for one in report.balance):
        random, balanced = found[groups, "random"], found[groups, "balanced"]
        rows.append(_balance_row(f"{groups} groups", "", random.step_waits, balanced.step_waits))
        if len(hues) > 1:
            rows += [
                _balance_row(unit, f"u{hues[unit]}", wait, balanced.waits[unit])
                for unit, wait in random.waits.items()
            ]
    return rows


def _balance_row(name: str, tone: str, random: float, balanced: float) -> dict[str, Any]:
    return {
        "name": name,
        "tone": tone,
        "random": 100 * random,
        "random_text": percent_text(random),
        "balanced": 100 * balanced,
        "balanced_text": percent_text(balanced),
    }


def _example(example: Example, hues: dict[str, int]) -> dict[str, Any]:
    spans, media = [], 0
    for span in example.spans:
        media += bool(span.unit)
        if not span.unit or media <= _MEDIA_SHOWN:
            spans.append(_span(span, hues))
    tokens = sum(span.tokens for span in example.spans)
    learned = sum(span.tokens for span in example.spans if span.carries_loss)
    more = counted(media - _MEDIA_SHOWN, "more item") + " not shown" if media > _MEDIA_SHOWN else ""
    return {
        "name": example.name,
        "why": example.why,
        "problem": example.problem,
        "spans": spans,
        "more": more,
        "facts": f"{counted(tokens, 'token')}, of which {learned:,} carry loss",
    }


def _span(span: ExampleSpan, hues: dict[str, int]) -> dict[str, Any]:
    text = span.text
    if len(text) > _LONGEST_TEXT:
        left_out = len(text) - _LONGEST_TEXT
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]} … {left_out:,} more characters … {text[-half:]}"
    picture = base64.b64encode(span.picture).decode("ascii")
    return {
        "text": text,
        "tokens": counted(span.tokens, "token"),
        "loss": span.carries_loss,
        "unit": span.unit,
        "hue": hues.get(span.unit, 0),
        "picture": f"data:image/jpeg;base64,{picture}" if picture else "",
        "bars": [
            {"x": 1.5 * order, "y": 24 - 22 * peak, "height": max(44 * peak, 1.0)}
            for order, peak in enumerate(span.peaks)
        ],
        "length": 1.5 * len(span.peaks),
    }


def _frame() -> dict[str, float]:
    return {
        "width": _WIDTH,
        "height": _TOP + _HEIGHT + _FOOT,
        "left": _LEFT,
        "top": _TOP,
        "floor": _TOP + _HEIGHT,
    }


def _scale(low: float, high: float, start: float, end: float) -> Any:
    span = (high - low) or 1.0
    return lambda value: round(start + (value - low) / span * (end - start), 2)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to eight round numbers from `low` to `high`."""
    step = _round_up((high - low) / 5.0 or 1.0)
    first = -(-low // step)
    return [(first + number) * step for number in range(int((high - first * step) // step) + 1)]


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, ...; at least 1, because samples and tokens are whole numbers."""
    power = 1.0
    while 10.0 * power <= value:
        power *= 10.0
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value)


def _span_text(low: float, high: float) -> str:
    """Return the whole numbers `low <= n < high` as text."""
    return f"{low:,.0f}" if high - low <= 1.0 else f"{low:,.0f} to {high - 1:,.0f}"
