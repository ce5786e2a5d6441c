"""Timing of work on a device. Importing this module imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Clock:
    """Times of work on a device. On a GPU, the seconds of the device are measured apart from those in which the host
    issues the work, because in training the host runs ahead: a pass takes the longer of both."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host_apart = device.type == "cuda"
        self._filler: tuple[torch.Tensor, float] | None = None

    @contextmanager
    def into(self, record: list[float], issued: float = 0.0) -> Iterator[None]:
        """Append the device's seconds for the work of the context to `record`. issued: seconds in which the host issues
        that work; a GPU gets other work for longer beforehand, so that it does not wait for the host in between."""
        if not self.is_host_apart:
            began = now()
            yield
            record.append(now() - began)
            return
        import torch

        torch.cuda.synchronize(self.device)
        if issued:
            self.occupy(1.5 * issued)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        torch.cuda.synchronize(self.device)
        record.append(first.elapsed_time(last) / 1e3)

    @contextmanager
    def issuing_into(self, record: list[float]) -> Iterator[None]:
        """Append the seconds in which the host issues the work of the context to a GPU to `record`."""
        import torch

        torch.cuda.synchronize(self.device)
        began = now()
        yield
        record.append(now() - began)

    def occupy(self, seconds: float) -> None:
        """Issue matrix products for about `seconds` of a GPU, without waiting for them."""
        import torch

        if self._filler is None:
            factor, taken = torch.zeros(4096, 4096, dtype=torch.float16, device=self.device), list[float]()
            for _ in range(2):  # the first one loads the kernel
                with self.into(taken):
                    torch.mm(factor, factor)
            self._filler = factor, taken[-1]
        factor, each = self._filler
        for _ in range(math.ceil(seconds / each)):
            torch.mm(factor, factor)


def deadlines(until: float, weights: Sequence[float]) -> Iterator[float]:
    """Yield, when each task begins, the time at which it should end. The remaining tasks divide the time left until
    `until` (a time of `now()`) in proportion to their positive `weights`."""
    for number, weight in enumerate(weights):
        began = now()
        yield began + max(0.0, until - began) * weight / sum(weights[number:])


def now() -> float:
    """Return seconds of a monotonic clock."""
    return time.perf_counter()
