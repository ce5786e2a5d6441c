"""Ctrl-C and SIGTERM as a wish to stop after the step in hand."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SAME_WISH_SECONDS = 2.0
"""Launchers pass a Ctrl-C on that has reached everybody already."""


class StopSignal:
    """While open, the first SIGINT or SIGTERM is noted in `signal` and calls `on_signal`; one that comes more than
    SAME_WISH_SECONDS later acts as it would without us. A signal that was ignored before stays ignored. Signals are the
    main thread's: opened in another one, this notes none."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.on_signal: Callable[[], None] = lambda: None
        self._noted_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
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

    def request(self) -> None:
        """As if SIGTERM had come; from any thread."""
        if self.signal is None:
            self.signal = signal.Signals.SIGTERM
            self._noted_at = time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._noted_at = time.monotonic()
            self.on_signal()
        elif time.monotonic() - self._noted_at > SAME_WISH_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
