"""Ctrl-C and SIGTERM as a wish to stop after the step in hand."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While open, the first SIGINT or SIGTERM is noted in `signal` and calls `on_signal`; a second one acts as it would
    without us, unless `patient`: then it is noted only."""

    def __init__(self, patient: bool = False) -> None:
        self._patient = patient
        self.signal: signal.Signals | None = None
        self.on_signal: Callable[[], None] = lambda: None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def received(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell or a scheduler expects of a process that a signal ended; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        if not self._patient:
            self._restore()
        self.on_signal()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
