"""When whoever watches a run is told of a step: at once, or while the ranks vote on the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dilatant.report.metrics import StepMetrics

AT_ONCE_SECONDS = 1.0
"""A step that took longer is told of at once: beside it a vote is nothing, and its live line would come a step late."""
KEPT = 2
"""Steps that may have come to count, and nobody is told of yet: one, and the next, whose vote is out meanwhile."""


class StepLog:
    """Steps that count, of which every `every`-th and number `last` are told of, once each and in their order.

    waits: whether `catch_up` is called after each step, when there is time for it. recent: the last of them, told of or
    not, for those who go on when the rank that writes them down is lost.
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
        """`observe` is told, until this ends: whoever watches may hold the trainer, which holds this."""
        self._observe = observe
        try:
            yield
        finally:
            self._observe = _nobody

    def add(self, metrics: StepMetrics) -> None:
        """A step counts. Raises as `observe`, where that is told at once."""
        if not self.keep(metrics):
            return
        self._waiting.append(metrics)
        if not self._waits or metrics.step_seconds > AT_ONCE_SECONDS:
            self.catch_up()

    def keep(self, metrics: StepMetrics) -> bool:
        """A step counts, of which nobody is told here; whether it is one of those to be told of."""
        if metrics.step % self._every and metrics.step != self.last:
            return False
        self.recent = (*self.recent, metrics)[-KEPT:]
        return True

    def catch_up(self) -> None:
        """Tell of what was put off. Raises as `observe`; what that raised for is not told again."""
        while self._waiting:
            self._observe(self._waiting.pop(0))


def _nobody(metrics: StepMetrics) -> None:
    """Watches."""
