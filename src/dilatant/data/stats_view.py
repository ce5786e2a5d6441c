"""Data statistics for people: in the terminal, or as an HTML page that needs nothing else."""

from __future__ import annotations

from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dilatant.data.stats import DataStats, Histogram, UnitStats

BARS = " ▁▂▃▄▅▆▇█"


def terminal_view(stats: DataStats) -> RenderableType:
    """Tables and histograms for a rich console."""
    parts: list[RenderableType] = [Text(_summary(stats))]
    table = Table("unit", "samples", "tokens", "mean", "p5", "p50", "p95", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for unit in stats.units:
        percentiles = [f"{unit.percentiles[percent]:,.0f}" for percent in (5, 50, 95, 99)]
        figures = [
            f"{unit.samples:,}",
            f"{unit.total:,}",
            f"{unit.mean:,.1f}",
            *percentiles,
            f"{unit.maximum:,}",
        ]
        table.add_row(Text(unit.unit), *figures)
    parts.append(table)
    for unit in stats.units:
        if unit.samples:
            parts.append(Text(f"{unit.unit} tokens per sample, from {unit.minimum:,} to {unit.maximum:,}"))
            parts.append(Text(f"  {bars(unit.histogram)}"))
    if stats.ratios:
        parts.append(Text("Tokens for each language token (95 % confidence interval)"))
        for ratio in stats.ratios:
            line = f"  {ratio.unit}  {ratio.ratio:.3f}  [{ratio.low:.3f}, {ratio.high:.3f}]"
            if ratio.correlation is not None:
                line += f"  correlation {ratio.correlation:+.2f}"
            parts.append(Text(line))
    return Group(*parts)


def bars(histogram: Histogram) -> str:
    """A histogram in one line of block characters; a bin that holds anything is never blank."""
    top = max(histogram.counts, default=0)
    return "".join(BARS[-(-count * (len(BARS) - 1) // top)] if top else " " for count in histogram.counts)


def html_page(stats: DataStats, title: str) -> str:
    """A page with the same figures and drawn histograms; no script, no font, no picture from outside."""
    rows = "".join(
        f"<tr><td>{escape(unit.unit)}</td>"
        + "".join(
            f"<td>{value:,.0f}</td>"
            for value in (unit.samples, unit.total, unit.mean, *unit.percentiles.values(), unit.maximum)
        )
        + "</tr>"
        for unit in stats.units
    )
    heads = ["unit", "samples", "tokens", "mean"]
    heads += [f"p{percent}" for percent in stats.units[0].percentiles] + ["max"]
    ratios = "".join(
        f"<li>{escape(ratio.unit)}: {ratio.ratio:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] tokens for each "
        f"{escape(ratio.to)} token</li>"
        for ratio in stats.ratios
    )
    drawings = "".join(_drawing(unit) for unit in stats.units if unit.samples)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>'
        "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em;color:#222;background:#fff}"
        "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}rect{fill:#3b6ea8}svg text{font-size:12px;fill:#555}"
        "@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}td,th{border-color:#444}"
        "rect{fill:#79a8dc}svg text{fill:#aaa}}"
        f"</style><h1>{escape(title)}</h1><p>{escape(_summary(stats))}</p><table><tr>"
        + "".join(f"<th>{head}</th>" for head in heads)
        + f"</tr>{rows}</table>"
        + (f"<p>Ratios with 95 % confidence intervals:</p><ul>{ratios}</ul>" if ratios else "")
        + f"{drawings}</html>\n"
    )


def _summary(stats: DataStats) -> str:
    mixes = ", ".join(f"{count:,} {mix}" for mix, count in stats.mixes.items())
    text = f"{stats.samples:,} samples ({mixes}); {stats.target_tokens:,} tokens carry loss"
    if stats.problems:
        text += f"; {stats.problems:,} samples could not be measured (see: dilatant data lint)"
    return text


def _drawing(unit: UnitStats) -> str:
    counts, edges = unit.histogram.counts, unit.histogram.edges
    width, height, foot = 720.0, 160.0, 20.0
    top = max(counts)
    each = width / len(counts)
    boxes = []
    for number, count in enumerate(counts):
        tall = height * count / top
        boxes.append(
            f'<rect x="{number * each:.1f}" y="{height - tall:.1f}" width="{each * 0.92:.1f}" height="{tall:.1f}">'
            f"<title>{edges[number]:.0f} to {edges[number + 1]:.0f} tokens: {count:,} samples</title></rect>"
        )
    marks = "".join(
        f'<text x="{width * share:.0f}" y="{height + foot - 5:.0f}" text-anchor="{anchor}">{value:,.0f}</text>'
        for share, anchor, value in (
            (0, "start", edges[0]),
            (0.5, "middle", (edges[0] + edges[-1]) / 2),
            (1, "end", edges[-1]),
        )
    )
    return (
        f"<h2>{escape(unit.unit)}: tokens per sample</h2>"
        f'<svg viewBox="0 0 {width:.0f} {height + foot:.0f}" role="img" width="100%" '
        f'aria-label="histogram of {escape(unit.unit)} tokens">{"".join(boxes)}{marks}</svg>'
    )
