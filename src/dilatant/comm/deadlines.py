"""Host-side deadlines for device waits: detect transfers that a GPU stream would wait for forever.

On a GPU `Pending.wait` only makes a stream wait, so no host call can time out. Instead the host polls which of the
awaited transfers have completed. A timeout starts at the last completion, not at the call, because the host may enqueue
a long step within moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stalled:
    """A stalled wait. what: the oldest wait. seconds: since the last completion. error: of the backend, if any."""

    what: str
    seconds: float
    error: str = ""


class ProgressDeadline:
    """Tracks the progress of awaited work. Has no thread and no clock; `now` is in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding: list[tuple[str, Callable[[], bool]]] = []
        self._last_progress = 0.0

    def add(self, what: str, is_completed: Callable[[], bool], now: float) -> None:
        """Track work that was just awaited; call in the order in which the device waits."""
        with self._lock:
            if not self._outstanding:
                self._last_progress = now
            self._outstanding.append((what, is_completed))

    def check(self, now: float) -> Stalled | None:
        """Return the oldest unfinished work and the time since the last completion; None if nothing is awaited."""
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
        """Stop tracking all work."""
        with self._lock:
            self._outstanding = []


class DeadlineThread:
    """Calls `on_stall` once, from its own thread, when awaited work has stalled for the timeout or has failed."""

    def __init__(self, timeout_seconds: float, on_stall: Callable[[Stalled], None]) -> None:
        self._progress = ProgressDeadline()
        self._timeout_seconds = timeout_seconds
        self._on_stall = on_stall
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dilatant-deadlines", daemon=True)
        self._thread.start()

    def add(self, what: str, is_completed: Callable[[], bool]) -> None:
        """See `ProgressDeadline.add`."""
        self._progress.add(what, is_completed, time.monotonic())

    def stalled(self) -> Stalled | None:
        """See `ProgressDeadline.check`."""
        return self._progress.check(time.monotonic())

    def close(self) -> None:
        """End the thread. Idempotent; the thread itself may call it."""
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
