"""A commit barrier that commits every step up to one, for trainers without agents and coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Refused(Exception):
    """The step is not committed, as if another rank had been lost."""


@dataclass
class Gate:
    """Commits every step before number `refuses`, and not that one."""

    refuses: int
    proposed: int = -1

    def begin(self, step: int, limit_seconds: float) -> None:
        pass

    def slow(self, times: float) -> None:
        pass

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        self.proposed = step

    def await_commit(self) -> None:
        if self.proposed == self.refuses:
            raise Refused
