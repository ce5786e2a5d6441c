"""Host-side deadlines for device waits: detect transfers that a GPU stream would wait for forever.

On a GPU `Pending.wait` only makes a stream wait, so no host call can time out. Instead the host polls which of the
awaited transfers have completed. A timeout starts at the last completion, not at the call, because the host may enqueue
a long step within moments. A poll asks the device's driver, which may block: a second thread checks that polls return.
"""

from __future__ import annotations

import faulthandler
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
            asked = list(self._outstanding)
        completed: set[int] = set()
        for what, is_completed in asked:  # without the lock, since it may block
            try:
                if is_completed():
                    completed.add(id(is_completed))
            except RuntimeError as error:
                return Stalled(what, now - self._last_progress, str(error) or "failed")
        with self._lock:
            if completed:
                self._last_progress = now
            self._outstanding = [each for each in self._outstanding if id(each[1]) not in completed]
        return self.oldest(now)

    def oldest(self, now: float) -> Stalled | None:
        """Return the result of the last `check` without asking for completions."""
        with self._lock:
            return Stalled(self._outstanding[0][0], now - self._last_progress) if self._outstanding else None

    def clear(self) -> None:
        """Stop tracking all work."""
        with self._lock:
            self._outstanding = []


class DeadlineThread:
    """Thread that calls `on_stall` once when awaited work has stalled for the timeout or has failed. It also does when
    `error` returns an error, or when these checks do not return. exits: end the process after three timeouts without
    checks: a driver may block with Python's lock held, and then no thread of Python runs."""

    def __init__(
        self,
        timeout_seconds: float,
        on_stall: Callable[[Stalled], None],
        error: Callable[[], str] = str,
        exits: bool = False,
    ) -> None:
        self._progress = ProgressDeadline()
        self._timeout_seconds = timeout_seconds
        self._on_stall = on_stall
        self._error = error
        self._closed = threading.Event()
        self._told = threading.Lock()
        self._exits = exits
        self._ticks_without_poll = 0
        self._interval = min(1.0, timeout_seconds / 20)
        self._threads = [
            threading.Thread(target=self._watch, args=(ask,), name="dilatant-deadlines", daemon=True)
            for ask in (self._poll, self._poll_returns)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, what: str, is_completed: Callable[[], bool]) -> None:
        """See `ProgressDeadline.add`."""
        self._progress.add(what, is_completed, time.monotonic())

    def oldest(self) -> Stalled | None:
        """See `ProgressDeadline.oldest`."""
        return self._progress.oldest(time.monotonic())

    def close(self) -> None:
        """End the threads. Idempotent; the threads themselves may call it."""
        self._closed.set()
        self._progress.clear()
        until = time.monotonic() + 5.0
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(max(0.0, until - time.monotonic()))
        if self._exits:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, ask: Callable[[], Stalled | None]) -> None:
        while not self._closed.wait(self._interval):
            stalled = ask()
            if stalled is not None and (stalled.error or stalled.seconds > self._timeout_seconds):
                if self._told.acquire(blocking=False) and not self._closed.is_set():
                    self._on_stall(stalled)
                return

    def _poll(self) -> Stalled | None:
        if self._exits:
            faulthandler.dump_traceback_later(3 * self._timeout_seconds, file=2, exit=True)
        if error := self._error():  # asked first, since operations that failed count as completed
            oldest = self.oldest()
            return Stalled("an operation" if oldest is None else oldest.what, 0.0, error)
        stalled = self._progress.check(time.monotonic())
        self._ticks_without_poll = 0
        return stalled

    def _poll_returns(self) -> Stalled:
        """Count this thread's own ticks, which stand still, as the polls do, while the process is stopped."""
        self._ticks_without_poll += 1
        return Stalled("its GPU's driver to answer", self._ticks_without_poll * self._interval)
