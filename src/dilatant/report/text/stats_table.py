"""Data report: the facts of the stats page as one value, in sentences, and as terminal tables."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from dilatant.data.index.stats import DataStats, UnitStats
from dilatant.data.text.example import Example
from dilatant.report.say import plain_table, print_line, print_table
from dilatant.report.text.plan_table import sparkline
from dilatant.report.text.wording import counted, listed, percent_text
from dilatant.schedule.assignment.batch_balance import BatchBalance

_REFUSALS_SHOWN = 5
_GROUPS = 4
"""Number of groups in the sentence on balance, or the nearest smaller number."""


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Statistics of a data set, how evenly batches of `batch_size` samples divide, and a few of its samples."""

    title: str
    stats: DataStats
    batch_size: int
    balance: tuple[BatchBalance, ...] = ()
    examples: tuple[Example, ...] = ()


def summarize_stats(report: StatsReport) -> tuple[str, ...]:
    """Return sentences on the data, on samples that training would refuse, and on the cost of uneven lengths."""
    stats = report.stats
    mixes = listed([f"{count:,} of {mix}" for mix, count in stats.mixes.items()])
    sentences = [f"{counted(stats.samples, 'sample')}: {mixes}." if mixes else f"{stats.samples:,} samples."]
    total = sum(unit.total for unit in stats.units[:1])
    if total:
        sentences.append(
            f"{stats.target_tokens:,} of {total:,} language tokens carry loss "
            f"({percent_text(stats.target_tokens / total)})."
        )
    if stats.refused:
        sentences.append(
            f"Training would refuse {counted(stats.refused, 'sample')}; dilatant data lint lists all, and finds "
            "media that cannot be decoded."
        )
    return (*sentences, *_spread(stats), *_balance(report))


def constant_text(unit: UnitStats) -> str:
    """Return the text for a unit whose samples all have the same number of tokens."""
    return f"each of its {counted(unit.samples, 'sample')} has {counted(unit.minimum, 'token')}"


def print_stats(report: StatsReport, console: Console) -> None:
    """Print the sentences, tables of units and of sources, ratios, balance, and refusals."""
    stats = report.stats
    for sentence in summarize_stats(report):
        print_line(console, sentence)
    figures = ("samples", "tokens", "mean", "p5", "p50", "p95", "p99", "max")
    table = plain_table(("unit", *figures), right=figures, whole=figures)
    for unit in stats.units:
        percentiles = [f"{unit.percentiles[percent]:,.0f}" for percent in (5, 50, 95, 99)]
        mean = f"{unit.mean:,.1f}"
        table.add_row(
            unit.unit, f"{unit.samples:,}", f"{unit.total:,}", mean, *percentiles, f"{unit.maximum:,}"
        )
    print_table(console, table)
    for unit in stats.units:
        if unit.samples and unit.minimum < unit.maximum:
            print_line(console, f"{unit.unit} tokens per sample, from {unit.minimum:,} to {unit.maximum:,}")
            print_line(console, f"  {sparkline([float(count) for count in unit.histogram.counts])}")
        elif unit.samples:
            print_line(console, f"{unit.unit}: {constant_text(unit)}")
    if stats.ratios:
        print_line(console, "Tokens for each language token (95 % confidence interval)")
        for ratio in stats.ratios:
            line = f"  {ratio.unit}  {ratio.ratio:.3f}  [{ratio.low:.3f}, {ratio.high:.3f}]"
            if ratio.correlation is not None:
                line += f"  correlation {ratio.correlation:+.2f}"
            print_line(console, line)
    if len(stats.sources) > 1:
        _print_sources(stats, console)
    for why in stats.refusals[:_REFUSALS_SHOWN]:
        print_line(console, ("  would be refused: ", "red"), why)


def _print_sources(stats: DataStats, console: Console) -> None:
    units = [f"{unit.unit} tokens" for unit in stats.units]
    figures = ("samples", "weight", "refused", *units)
    table = plain_table(("source", *figures), right=figures)
    for source in stats.sources:
        table.add_row(
            source.name,
            f"{source.samples:,}",
            f"{source.weight:g}",
            f"{source.refused:,}",
            *(f"{source.tokens[unit.unit]:,}" for unit in stats.units),
        )
    print_table(console, table)


def _spread(stats: DataStats) -> list[str]:
    """Return how much longer than the median a unit's tail is, which makes balancing necessary."""
    wide = [
        f"{unit.unit} {unit.percentiles[99] / unit.percentiles[50]:.1f} times"
        for unit in stats.units
        if unit.samples and unit.percentiles[50] and unit.percentiles[99] >= 1.5 * unit.percentiles[50]
    ]
    return [f"The longest percent of samples is longer than the median: {listed(wide)}."] if wide else []


def _balance(report: StatsReport) -> list[str]:
    groups = max((one.groups for one in report.balance if one.groups <= _GROUPS), default=None)
    waits = {one.policy: one.step_waits for one in report.balance if one.groups == groups}
    if groups is None or not {"random", "balanced"} <= waits.keys() or waits["random"] <= 0.0:
        return []
    return [
        f"With batches of {report.batch_size:,} over {groups} replicas placed by count, devices would wait "
        f"{percent_text(waits['random'])} of the time for the slowest; placed by the policy balanced, "
        f"{percent_text(waits['balanced'])}."
    ]
