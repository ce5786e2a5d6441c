"""Timing of work on a device. Importing this module imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Clock:
    """Wall clock for work on a device; synchronizes with the device before each reading."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def into(self, record: list[float]) -> TimedSpan:
        """Return a context manager that appends its duration in seconds to `record`."""
        return TimedSpan(self, record)

    def now(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class TimedSpan:
    """The context manager of `Clock.into`."""

    def __init__(self, clock: Clock, record: list[float]) -> None:
        self._clock, self._record = clock, record

    def __enter__(self) -> None:
        self._began = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._record.append(self._clock.now() - self._began)


def deadlines(until: float, weights: Sequence[float]) -> Iterator[float]:
    """Yield, when each task begins, the time at which it should end: the remaining tasks divide the time left until
    `until` (a time of `now()`) in proportion to their positive `weights`."""
    for number, weight in enumerate(weights):
        began = now()
        yield began + max(0.0, until - began) * weight / sum(weights[number:])


def now() -> float:
    """Return seconds of a monotonic clock."""
    return time.perf_counter()
