"""Candidate: a standby leader may take over only with more than half of the last members."""

from __future__ import annotations

from dilatant.resilience.protocol.values import Record, Status


class LeaderCandidate:
    """Counts the members in `record` (the last coordinator's) that connect here, since no other coordinator answers.

    A member belongs to one coordinator at a time, so at most one coordinator can have a majority.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._here: set[str] = set()

    def hear(self, status: Status) -> None:
        """Count the node of a status, even one that has failed, since it has no other coordinator."""
        if status.node in self.record.members:
            self._here.add(status.node)

    def lost(self, node: str) -> None:
        """Stop counting a node that is gone, or has found another coordinator."""
        self._here.discard(node)

    @property
    def is_elected(self) -> bool:
        return 2 * len(self._here) > len(self.record.members)
