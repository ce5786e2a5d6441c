"""Step log: reports finished steps to an observer, at once or while the ranks vote on the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dilatant.report.metrics import StepMetrics

AT_ONCE_SECONDS = 1.0
"""Longer steps are reported at once: a vote is negligible beside them, and the live line would lag by a step."""
KEPT = 2
"""Number of steps that may be committed but unreported: one, and the next while its vote is pending."""


class StepLog:
    """Report committed steps to an observer: every `every`-th and number `last`, once each and in order.

    waits: `catch_up` is called after each step, when there is time for it. recent: the last of these steps, reported or
    not, for the ranks that continue when the rank that writes them down is lost.
    """

    def __init__(self, every: int, last: int, waits: bool) -> None:
        self._every = every
        self.last = last
        self._waits = waits
        self._waiting: list[StepMetrics] = []
        self._observe: Callable[[StepMetrics], None] = _nobody
        self.recent: tuple[StepMetrics, ...] = ()

    @contextmanager
    def telling(self, observe: Callable[[StepMetrics], None]) -> Iterator[None]:
        """Report to `observe` inside this context only: the observer may hold the trainer, which holds this log."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = _nobody

    def add(self, metrics: StepMetrics) -> None:
        """Add a committed step, and report it now unless it may wait. Raises what `observe` raises."""
        if not self.keep(metrics):
            return
        self._waiting.append(metrics)
        if not self._waits or metrics.step_seconds > AT_ONCE_SECONDS:
            self.catch_up()

    def keep(self, metrics: StepMetrics) -> bool:
        """Add a committed step to `recent` without reporting it; return True if it is one of those to report."""
        if metrics.step % self._every and metrics.step != self.last:
            return False
        self.recent = (*self.recent, metrics)[-KEPT:]
        return True

    def catch_up(self) -> None:
        """Report the delayed steps. Raises what `observe` raises; a step for which it raised is not reported again."""
        while self._waiting:
            self._observe(self._waiting.pop(0))


def _nobody(metrics: StepMetrics) -> None:
    """Observer that ignores all steps."""
