"""Errors of communication: aborted, or timed out."""

from __future__ import annotations

from collections.abc import Sequence


class CommAborted(RuntimeError):
    """Communication of this generation was aborted; the message contains origin and reason."""


class CommTimeout(RuntimeError):
    """A peer did not answer in time; the message says what was awaited, and which ranks are unresponsive or busy.

    culprits: the unresponsive or busy ranks; empty if all ranks answer that they are waiting.
    """

    def __init__(self, message: str, culprits: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)
