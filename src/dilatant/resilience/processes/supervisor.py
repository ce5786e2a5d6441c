"""Coordinator supervision: one machine, a leader of several machines and a standby all keep a coordinator running."""

from __future__ import annotations

import time
from dataclasses import replace

from dilatant.resilience.processes.process import (
    COORDINATOR,
    NO_MAJORITY_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    Child,
    ProcessStart,
)

BETWEEN_STARTS_SECONDS, UNATTENDED_SECONDS = 0.25, 30.0
"""Pause between restarts of a coordinator that exits at once (port in use, disk full), and limit for all restarts."""
FINAL_EXIT_CODES = (0, SUPERSEDED_EXIT_CODE, NO_MAJORITY_EXIT_CODE)
"""Exit codes of a coordinator that must not be replaced: the run is over, or another coordinator leads it."""


class CoordinatorSupervisor:
    """Starts a coordinator and replaces it when it dies or hangs, as often as `watch` is called, until `close`."""

    def __init__(self, start: ProcessStart) -> None:
        self._start = start
        self.child = Child(COORDINATOR, start)
        self._began = self._answered = time.monotonic()
        self.failure = ""
        """Why the run cannot continue, once no coordinator could be started for UNATTENDED_SECONDS."""

    def await_port(self) -> int:
        """Return the coordinator's port, which its successors keep. Raises RuntimeError if it ends before."""
        self._start = replace(self._start, port=self.child.port)
        return self._start.port

    def watch(self) -> bool:
        """Replace a coordinator that has died or hangs. Returns True once none coordinates the run here any more."""
        now = time.monotonic()
        if self.child.is_alive:
            if not self.child.stands_still():
                self._answered = now if self.child.has_answered else self._answered
                return False
        elif self.child.process.returncode in FINAL_EXIT_CODES or self.failure:
            return True
        elif now - self._answered > UNATTENDED_SECONDS:
            self.failure = (
                f"no coordinator could be started for {UNATTENDED_SECONDS:.0f} s (what it wrote is above); "
                "`dilatant resume` goes on from the newest checkpoint"
            )
            return True
        elif now - self._began < BETWEEN_STARTS_SECONDS:
            return False
        self.child.close()
        self.child = Child(COORDINATOR, self._start)
        self._began = time.monotonic()
        return False

    def end(self) -> None:
        """Ask all ranks to save and end."""
        self.child.process.terminate()

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the coordinator to end, then kill it."""
        self.child.close(seconds)
