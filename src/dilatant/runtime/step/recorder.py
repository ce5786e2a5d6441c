"""Record when each action of one rank began, how long it waited and for which rank, and how long it computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from dilatant.schedule.schedule import Action, MeasuredAction


@dataclass(slots=True)
class _Open:
    unit: str
    action: Action
    samples: tuple[int, ...]
    marks: list[Any]
    waits: dict[int, float]


@dataclass(slots=True)
class _Step:
    epoch: float
    origin: Any
    actions: list[_Open] = field(default_factory=list)


class Recorder:
    """Records the actions of one step. On a GPU it uses CUDA events, so that recording does not synchronize."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._last = _Step(0.0, None)
        self._actions: list[_Open] = []
        self._range: ExitStack | None = None  # the open range; None outside `named_ranges`

    @contextmanager
    def named_ranges(self) -> Iterator[None]:
        """Open a context in which each action's wait for rows and its computation are ranges of profilers and NVTX."""
        with ExitStack() as self._range:
            yield
        self._range = None

    def _name_range(self, prefix: str = "") -> None:
        """End the open range, and begin that of the current action."""
        if self._range is not None:
            self._range.close()
            unit, action = self._actions[-1].unit, self._actions[-1].action
            name = f"{prefix}{unit} stage {action.stage} {action.kind} microbatch {action.microbatch}"
            self._range.enter_context(record_function(name))
            if self._on_gpu:
                self._range.enter_context(torch.cuda.nvtx.range(name))

    def begin(self, kept: bool = True) -> None:
        """Begin a step. Its record replaces the previous one if `kept`."""
        step = _Step(time.time(), self._mark())
        self._actions = step.actions
        if kept:
            self._last = step

    def start(self, unit: str, action: Action, samples: tuple[int, ...]) -> None:
        """Begin an action, which may first wait for rows."""
        self._actions.append(_Open(unit, action, samples, [self._mark()], {}))
        self._name_range("rows for ")

    def waited(self, source: int, seconds: float) -> None:
        """Add host time spent waiting for rows of rank `source`."""
        waits = self._actions[-1].waits
        waits[source] = waits.get(source, 0.0) + seconds

    def computing(self) -> None:
        """Mark that all inputs of the action have arrived."""
        self._actions[-1].marks.append(self._mark())
        self._name_range()

    def done(self) -> None:
        """Mark the end of the action."""
        self._actions[-1].marks.append(self._mark())
        if self._range is not None:
            self._range.close()

    def seconds(self) -> float:
        """Return seconds since `begin`. On a GPU this synchronizes with the device."""
        mark = self._mark()
        if self._on_gpu:
            mark.synchronize()
        return self._seconds(mark)

    def rows(self) -> tuple[MeasuredAction, ...]:
        """Return the measured actions of the last kept step. On a GPU this synchronizes with the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        rows = []
        for entry in self._last.actions:
            begun, ready, end = (self._seconds(mark) for mark in entry.marks)
            rows.append(
                MeasuredAction(
                    rank=self._rank,
                    unit=entry.unit,
                    action=entry.action,
                    samples=entry.samples,
                    start=self._last.epoch + begun,
                    waited_seconds=ready - begun,
                    waited_for=max(entry.waits, key=entry.waits.__getitem__, default=None),
                    seconds=end - ready,
                )
            )
        return tuple(rows)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        origin = self._last.origin
        return origin.elapsed_time(mark) / 1000 if self._on_gpu else mark - origin
