"""Data report: the facts of the stats page as one value, and in sentences."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.data.index.stats import DataStats, UnitStats
from dilatant.data.sample import Example
from dilatant.report.text.wording import counted, listed, percent_text
from dilatant.schedule.assignment.batch_balance import BatchBalance

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
