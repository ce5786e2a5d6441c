"""Data report: every fact of the stats page as one plain value."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.data.index.stats import DataStats
from dilatant.data.sample import Example
from dilatant.schedule.assignment.batch_balance import BatchBalance


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Statistics of a data set, how evenly batches of `batch_size` samples divide, and a few of its samples."""

    title: str
    stats: DataStats
    batch_size: int
    balance: tuple[BatchBalance, ...] = ()
    examples: tuple[Example, ...] = ()
