"""Times of calls on a CPU or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSHED_BYTES = 1 << 28
"""Written between calls on a GPU, so that no call finds its inputs in the cache."""


def median_seconds(calls: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, float]:
    """The median of `repeats` times of each call. The calls take turns, so that drift hits all alike; one round before
    warms up and compiles."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    flushed = torch.empty(FLUSHED_BYTES if device.type == "cuda" else 0, dtype=torch.int8, device=device)
    for number in range(repeats + 1):
        for name, call in calls.items():
            flushed.zero_()
            seconds = _timed(call, device)
            if number:
                taken[name].append(seconds)
    return {name: statistics.median(times) for name, times in taken.items()}


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def host_milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The best of several on the host: the machine may be busy with other work."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3
