"""Timing of work on a device. Importing this module imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Clock:
    """Wall clock for work on a device; synchronizes with the device before each reading."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def into(self, record: list[float]) -> Iterator[None]:
        """Append the duration of the context in seconds to `record`."""
        began = self.now()
        yield
        record.append(self.now() - began)

    def now(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def deadlines(until: float, weights: Sequence[float]) -> Iterator[float]:
    """Yield, when each task begins, the time at which it should end: the remaining tasks divide the time left until
    `until` (a time of `now()`) in proportion to their positive `weights`."""
    for number, weight in enumerate(weights):
        began = now()
        yield began + max(0.0, until - began) * weight / sum(weights[number:])


def now() -> float:
    """Return seconds of a monotonic clock."""
    return time.perf_counter()
