"""Data report as a page, one HTML file that needs no network and opens from a disk, and on a terminal."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console

from dilatant.data.index.stats import DataStats, JointHistogram, UnitStats
from dilatant.data.sample import Example, ExampleSpan
from dilatant.report.pages.page import render, write_page
from dilatant.report.parts import HUES, Cell, Column, Part, Section, Table, number, plain_bar, summary, tiles
from dilatant.report.printed_parts import print_parts
from dilatant.report.text.stats_summary import StatsReport, constant_text, summarize_stats
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
    return render(
        f"{report.title} · Dilatant data",
        report.title,
        f"{counted(stats.samples, 'sample')} for {counted(len(stats.units), 'unit')}, measured without decoding media",
        stats_parts(report),
        "Measured from headers and text; the training data alone, without what is held out.",
    )


def print_stats(report: StatsReport, console: Console) -> None:
    """Print what the page says."""
    print_parts(console, stats_parts(report))


def stats_parts(report: StatsReport) -> list[Part]:
    """Return all that the page and the terminal show, in order."""
    stats = report.stats
    # Encoders come before the language model, as in a plan, so that a unit has one colour on every page.
    order = [unit.unit for unit in (*stats.units[1:], *stats.units[:1])]
    hues = {unit.unit: order.index(unit.unit) % HUES for unit in stats.units}
    sections = (
        _refusals(stats),
        _units(stats, hues),
        _balance(report, hues),
        _ratios(stats, hues),
        _sources(stats, hues),
        _examples(report, hues),
    )
    sentences = map(unbroken, summarize_stats(report))
    return [_tiles(stats), summary(sentences), *(("section", one) for one in sections)]


def _tiles(stats: DataStats) -> Part:
    bad = "bad" if stats.refused else "good"
    return tiles(
        [
            (f"{stats.samples:,}", "samples", ""),
            *((count_text(unit.total), f"{unit.unit} tokens", "") for unit in stats.units),
            (count_text(stats.target_tokens), "tokens that carry loss", ""),
            (f"{stats.refused:,}", "samples that training would refuse", bad),
        ]
    )


def _refusals(stats: DataStats) -> Section:
    hidden = stats.refused - len(stats.refusals)
    texts = [*stats.refusals, *([f"and {hidden:,} more"] if hidden > 0 else [])]
    note = Markup("Known from headers and text alone; <code>dilatant data lint</code> also decodes.")
    parts: list[Part] = [("list", ("refusals", texts))] if stats.refusals else []
    return Section("refused", "What training would refuse", note, parts)


def _units(stats: DataStats, hues: dict[str, int]) -> Section:
    parts: list[Part] = [("charts", [_unit(unit, hues[unit.unit]) for unit in stats.units])]
    if len(stats.mixes) > 1:
        rows = [
            (mix, plain_bar(count / max(stats.samples, 1), "shade other"), f"{count:,}")
            for mix, count in stats.mixes.items()
        ]
        columns = (Column(), Column("", "wide"), Column("", "number", "samples"))
        parts.append(("table", Table(columns, rows, caption="What samples hold")))
    note = "Of the samples that have work in a unit. The wider these spread, the more there is to balance."
    return Section("units", "Tokens per sample", note, parts)


def _unit(unit: UnitStats, hue: int) -> dict[str, Any]:
    facts = {
        "samples": f"{unit.samples:,}",
        "mean": count_text(unit.mean),
        **{f"{percent} %": count_text(value) for percent, value in unit.percentiles.items()},
        "largest": count_text(unit.maximum),
    }
    sentence = ""
    if not unit.samples:
        sentence = "No sample has any work here."
    elif unit.minimum == unit.maximum:
        text = constant_text(unit)
        sentence = f"{text[0].upper()}{text[1:]}."
    chart = {} if sentence else {**_histogram(unit), "heights": unit.histogram.counts}
    label = f"Samples by {unit.unit} tokens"
    return {"title": unit.unit, "label": label, "hue": hue, "facts": facts, "sentence": sentence, **chart}


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
    marks = [
        {"x": x(unit.percentiles[percent] + middle), "name": name, "top": _TOP, "anchor": ""}
        for percent, name in medians
    ]
    return {
        **_frame("F"),
        "bars": bars,
        "marks": marks,
        "rows": [{"y": y(value), "text": count_text(value)} for value in _ticks(0.0, top)],
        "columns": [{"x": x(value + middle), "text": count_text(value)} for value in _ticks(edges[0], last)],
    }


def _ratios(stats: DataStats, hues: dict[str, int]) -> Section:
    joint = {one.unit: one for one in stats.joint}
    rows = [
        (
            Cell(ratio.unit, tone=f"shade u{hues[ratio.unit]} B"),
            ratio.to,
            f"{ratio.ratio:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            "" if ratio.correlation is None else f"{ratio.correlation:+.2f}".replace("-", "−"),
        )
        for ratio in stats.ratios
    ]
    columns = (
        Column("Unit"), number("for each token of"), number("ratio", ""), number("95 % confidence", ""),
        number("correlation"),
    )  # fmt: skip
    charts = [_joint_chart(joint[one.unit], hues[one.unit]) for one in stats.ratios if one.unit in joint]
    note = (
        "Tokens of an encoder for each token of the language model. Where both rise together, a batch that is balanced "
        "in one is nearly so in the other."
    )
    parts: list[Part] = [("table", Table(columns, rows, "figures stack")), ("charts", charts)]
    return Section("ratios", "Units against each other", note, parts if rows else ())


def _joint_chart(joint: JointHistogram, hue: int) -> dict[str, Any]:
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
        **_frame("B"),
        "title": f"{joint.unit} tokens against {joint.to} tokens",
        "label": f"Samples by {joint.to} tokens (across) and {joint.unit} tokens (up)",
        "hue": hue,
        "sentence": "",
        "facts": {},
        "marks": [],
        "bars": cells,
        "rows": [
            {"y": y(value), "text": count_text(value)}
            for value in _ticks(*joint.edges[:: len(joint.edges) - 1])
        ],
        "columns": [
            {"x": x(value), "text": count_text(value)}
            for value in _ticks(*joint.to_edges[:: len(joint.to_edges) - 1])
        ],
    }


def _sources(stats: DataStats, hues: dict[str, int]) -> Section:
    """Return a line for each source of a blend; empty for a single source."""
    largest = {unit: max(source.tokens[unit] for source in stats.sources) or 1 for unit in hues}
    rows = []
    for source in stats.sources:
        cells: list[str | Cell] = [f"{source.samples:,}", f"{source.weight:g}"]
        cells.append(Cell(f"{source.refused:,}", bad=source.refused > 0))
        for unit, hue in hues.items():
            tokens = source.tokens[unit]
            tone, title = f"u{hue} shade F", f"{count_text(tokens)} tokens"
            cells += [
                plain_bar(tokens / largest[unit], tone, title),
                count_text(tokens / max(source.samples, 1)),
            ]
        rows.append([source.name, *cells])
    columns = [Column("Source", "path"), *map(number, ("samples", "weight", "refused"))]
    for unit in hues:
        columns += [Column(f"{unit} tokens", "third"), number("mean", f"{unit} mean")]
    parts: list[Part] = [("table", Table(columns, rows))] if len(rows) > 1 else []
    return Section("sources", "Sources", "Tokens in all, and the mean of a sample.", parts)


def _balance(report: StatsReport, hues: dict[str, int]) -> Section:
    """Return lines for every number of groups: all devices together, then each unit alone."""
    rows, styles = [], []

    def add(name: str, style: str, random: float, balanced: float) -> None:
        tones = ("shade F", "shade B") if style else ("shade other", "shade other")
        bars = [plain_bar(part, tone) for part, tone in zip((random, balanced), tones)]
        rows.append((name, bars[0], percent_text(random), bars[1], percent_text(balanced)))
        styles.append(style)

    waits = {(one.groups, one.policy): one for one in report.balance}
    for groups in dict.fromkeys(one.groups for one in report.balance):
        random, balanced = waits[groups, "random"], waits[groups, "balanced"]
        add(f"{groups} groups", "", random.step_waits, balanced.step_waits)
        for unit, wait in random.waits.items() if len(hues) > 1 else ():
            add(unit, f"u{hues[unit]} part", wait, balanced.waits[unit])
    columns = (
        Column(), Column("By count", "third"), number("waits", "by count"), Column("Balanced", "third"),
        number("waits", "balanced"),
    )  # fmt: skip
    note = Markup(
        "How long devices would wait for the largest group, when batches of {} samples are divided into replicas or "
        "microbatches: by count, and by the policy <code>balanced</code>. Work is taken to be in proportion to tokens, "
        "devices to be in proportion to work; below each, the units alone. The policy shortens the step: a unit that "
        "does not delay it may wait longer than by count."
    ).format(f"{report.batch_size:,}")
    parts: list[Part] = [("table", Table(columns, rows, row_styles=styles))] if rows else []
    return Section("balance", "What balancing is worth", note, parts)


def _examples(report: StatsReport, hues: dict[str, int]) -> Section:
    note = Markup(
        'The text after the chat template. <span class="loss">Marked</span> is what carries loss: the model learns to '
        "write it."
    )
    parts: list[Part] = [("examples", [_example(one, hues) for one in report.examples])]
    return Section(
        "examples",
        "Samples as the model sees them",
        note,
        parts if report.examples else (),
        in_terminal=False,
    )


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


def _frame(tone: str) -> dict[str, Any]:
    return {
        "tone": tone,
        "text": "",
        "width": _WIDTH,
        "height": _TOP + _HEIGHT + _FOOT,
        "left": _LEFT,
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
