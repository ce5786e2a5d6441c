"""Whether a standby may lead: only with more than half of those who were members last."""

from __future__ import annotations

from dilatant.resilience.protocol.values import Record, Status


class Candidate:
    """Counts the members of a record that come here because nobody else answers them. record: the last coordinator's.

    A member belongs to one coordinator at a time, so at most one can have most of them.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._here: set[str] = set()

    def hear(self, status: Status) -> None:
        """A node says how it is; one that has failed is led by nobody else, either."""
        if status.node in self.record.members:
            self._here.add(status.node)

    def lost(self, node: str) -> None:
        """A node is gone, or has found another coordinator."""
        self._here.discard(node)

    @property
    def is_elected(self) -> bool:
        return 2 * len(self._here) > len(self.record.members)
