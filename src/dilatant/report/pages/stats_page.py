"""Data report as a page, one HTML file that needs no network and opens from a disk, and on a terminal."""

from __future__ import annotations

import base64
from typing import Any

from markupsafe import Markup

from dilatant.data.index.stats import DataStats, JointHistogram, UnitStats
from dilatant.data.sample import Example, ExampleSpan
from dilatant.report.pages.charts import HEIGHT, LEFT, TOP, WIDTH, frame, histogram, scale, span_text, ticks
from dilatant.report.pages.page import render
from dilatant.report.parts import HUES, Cell, Column, PageSection, Part, Table, number, plain_bar, summary, tiles
from dilatant.report.text.stats_summary import StatsReport, constant_text, summarize_stats
from dilatant.report.text.wording import count_text, counted, percent_text, unbroken

_LONGEST_TEXT = 1_600
"""Maximum characters shown of one run of text."""
_MEDIA_SHOWN = 6


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


def _refusals(stats: DataStats) -> PageSection:
    hidden = stats.refused - len(stats.refusals)
    texts = [*stats.refusals, *([f"and {hidden:,} more"] if hidden > 0 else [])]
    note = Markup("Known from headers and text alone; <code>dilatant data lint</code> also decodes.")
    parts: list[Part] = [("list", ("refusals", texts))] if stats.refusals else []
    return PageSection("refused", "What training would refuse", note, parts)


def _units(stats: DataStats, hues: dict[str, int]) -> PageSection:
    parts: list[Part] = [("charts", [_unit(unit, hues[unit.unit]) for unit in stats.units])]
    if len(stats.mixes) > 1:
        rows = [
            (mix, plain_bar(count / max(stats.samples, 1), "shade other"), f"{count:,}")
            for mix, count in stats.mixes.items()
        ]
        columns = (Column(), Column("", "wide"), Column("", "number", "samples"))
        parts.append(("table", Table(columns, rows, caption="What samples hold")))
    note = "Of the samples that have work in a unit. The wider these spread, the more there is to balance."
    return PageSection("units", "Tokens per sample", note, parts)


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
    medians = {"median": unit.percentiles[50], "95 %": unit.percentiles[95]}
    chart = {} if sentence else histogram(unit.histogram.edges, unit.histogram.counts, medians)
    label = f"Samples by {unit.unit} tokens"
    return {"title": unit.unit, "label": label, "hue": hue, "facts": facts, "sentence": sentence, **chart}


def _ratios(stats: DataStats, hues: dict[str, int]) -> PageSection:
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
    return PageSection("ratios", "Units against each other", note, parts if rows else ())


def _joint_chart(joint: JointHistogram, hue: int) -> dict[str, Any]:
    """Return samples by tokens of both units; darker cells have more samples."""
    x = scale(joint.to_edges[0], joint.to_edges[-1], LEFT, WIDTH)
    y = scale(joint.edges[0], joint.edges[-1], TOP + HEIGHT, TOP)
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
                    "title": f"{span_text(left, right)} {joint.to} tokens, {span_text(low, high)} {joint.unit} "
                    f"tokens: {counted(count, 'sample')}",
                }
            )
    return {
        **frame("B"),
        "title": f"{joint.unit} tokens against {joint.to} tokens",
        "label": f"Samples by {joint.to} tokens (across) and {joint.unit} tokens (up)",
        "hue": hue,
        "sentence": "",
        "facts": {},
        "marks": [],
        "bars": cells,
        "rows": [{"y": y(value), "text": count_text(value)} for value in ticks(*joint.edges[:: len(joint.edges) - 1])],
        "columns": [
            {"x": x(value), "text": count_text(value)} for value in ticks(*joint.to_edges[:: len(joint.to_edges) - 1])
        ],
    }


def _sources(stats: DataStats, hues: dict[str, int]) -> PageSection:
    """Return a line for each source of a blend; empty for a single source."""
    largest = {unit: max(source.tokens[unit] for source in stats.sources) or 1 for unit in hues}
    rows = []
    for source in stats.sources:
        cells: list[str | Cell] = [f"{source.samples:,}", f"{source.weight:g}"]
        cells.append(Cell(f"{source.refused:,}", bad=source.refused > 0))
        for unit, hue in hues.items():
            tokens = source.tokens[unit]
            tone, title = f"u{hue} shade F", f"{count_text(tokens)} tokens"
            cells += [plain_bar(tokens / largest[unit], tone, title), count_text(tokens / max(source.samples, 1))]
        rows.append([source.name, *cells])
    columns = [Column("Source", "path"), *map(number, ("samples", "weight", "refused"))]
    for unit in hues:
        columns += [Column(f"{unit} tokens", "third"), number("mean", f"{unit} mean")]
    parts: list[Part] = [("table", Table(columns, rows))] if len(rows) > 1 else []
    return PageSection("sources", "Sources", "Tokens in all, and the mean of a sample.", parts)


def _balance(report: StatsReport, hues: dict[str, int]) -> PageSection:
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
    return PageSection("balance", "What balancing is worth", note, parts)


def _examples(report: StatsReport, hues: dict[str, int]) -> PageSection:
    note = Markup(
        'The text after the chat template. <span class="loss">Marked</span> is what carries loss: the model learns to '
        "write it."
    )
    parts: list[Part] = [("examples", [_example(one, hues) for one in report.examples])]
    return PageSection(
        "examples", "Samples as the model sees them", note, parts if report.examples else (), in_terminal=False
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
