"""Stop signal: Ctrl-C or SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

SAME_WISH_SECONDS = 2.0
"""Signals closer together than this are one request: launchers forward a Ctrl-C that all processes got already."""


class StopSignal:
    """While open, store the first SIGINT or SIGTERM in `signal` and call `on_signal`. A signal more than
    SAME_WISH_SECONDS later has its usual effect. A signal that was ignored before stays ignored. Only the main thread
    gets signals: opened in another thread, this stores none."""

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self.signal: signal.Signals | None = None
        self.on_signal = on_signal
        self._noted_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    @property
    def received(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code that shells and schedulers expect of a process ended by a signal; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def request(self) -> None:
        """Request a stop as if SIGTERM had arrived; callable from any thread."""
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


class RunStopped(Exception):
    """Raised when a signal ends a run before training begins or after it ends: no step is lost. exit_code: as in
    `RunResult`. can_resume: `output_dir` holds the run."""

    def __init__(self, exit_code: int, output_dir: str) -> None:
        self.exit_code = exit_code
        self.can_resume = Path(output_dir, "config.yaml").exists()
        then = "go on with `dilatant resume`" if self.can_resume else "nothing had begun, so start it again"
        super().__init__(f"stopped by {signal.Signals(exit_code - 128).name} while no step was trained; {then}")
