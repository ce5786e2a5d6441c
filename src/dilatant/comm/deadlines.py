"""Deadlines that the host keeps for what a device waits for: no stream waits for ever unseen.

On a GPU `Pending.wait` only makes a stream wait, so no call of the host can time out. Instead the host asks now and
then which of the awaited transfers have completed. A deadline counts from the last one that did, not from the time of
the call: the host may enqueue a long step within moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stalled:
    """What nothing has moved behind. seconds: since anything awaited has completed. error: of the backend, if any."""

    what: str
    seconds: float
    error: str = ""


class ProgressDeadline:
    """Whether awaited work makes progress. Holds no thread and reads no clock; `now` is in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding: list[tuple[str, Callable[[], bool]]] = []
        self._last_progress = 0.0

    def add(self, what: str, is_completed: Callable[[], bool], now: float) -> None:
        """Watch work that was just awaited; in the order in which the device awaits it."""
        with self._lock:
            if not self._outstanding:
                self._last_progress = now
            self._outstanding.append((what, is_completed))

    def check(self, now: float) -> Stalled | None:
        """The work awaited longest, and since when nothing has completed; None when nothing is awaited."""
        with self._lock:
            left = []
            for what, is_completed in self._outstanding:
                try:
                    completed = is_completed()
                except RuntimeError as error:
                    return Stalled(what, now - self._last_progress, str(error) or "failed")
                if not completed:
                    left.append((what, is_completed))
            if len(left) < len(self._outstanding):
                self._last_progress = now
            self._outstanding = left
            return Stalled(left[0][0], now - self._last_progress) if left else None

    def clear(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            self._outstanding = []


class DeadlineThread:
    """Calls `on_stall` once, from a thread of its own, when awaited work has stalled for a timeout or has failed."""

    def __init__(self, timeout_seconds: float, on_stall: Callable[[Stalled], None]) -> None:
        self._progress = ProgressDeadline()
        self._timeout_seconds = timeout_seconds
        self._on_stall = on_stall
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dilatant-deadlines", daemon=True)
        self._thread.start()

    def add(self, what: str, is_completed: Callable[[], bool]) -> None:
        """As `ProgressDeadline.add`."""
        self._progress.add(what, is_completed, time.monotonic())

    def stalled(self) -> Stalled | None:
        """As `ProgressDeadline.check`."""
        return self._progress.check(time.monotonic())

    def close(self) -> None:
        """End the thread. May be called twice, and by the thread itself."""
        self._closed.set()
        self._progress.clear()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout_seconds / 20)):
            stalled = self.stalled()
            if stalled is not None and (stalled.error or stalled.seconds > self._timeout_seconds):
                if not self._closed.is_set():
                    self._on_stall(stalled)
                return
