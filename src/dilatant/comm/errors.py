"""Errors of communication (aborted, or timed out), and the failure of a worker."""

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


class WorkerFailed(RuntimeError):
    """A worker ended the run. The message begins with its rank and error; `details` is its traceback.
    killed_by: the signal that killed it, if any. exit_code: exit code for a scheduler."""

    def __init__(self, message: str, details: str = "", killed_by: int | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details
        self.killed_by = killed_by
