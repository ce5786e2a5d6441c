"""The data report: every fact of the stats page as one plain value."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.data.index.stats import DataStats
from dilatant.data.text.example import Example
from dilatant.schedule.assignment.batch_balance import BatchBalance


@dataclass(frozen=True, slots=True)
class StatsReport:
    """What a data set is like, how evenly batches of `batch_size` samples of it divide, and a few samples of it."""

    title: str
    stats: DataStats
    batch_size: int
    balance: tuple[BatchBalance, ...] = ()
    examples: tuple[Example, ...] = ()
