"""How communication ends when it does not end well."""

from __future__ import annotations

from collections.abc import Sequence


class CommAborted(RuntimeError):
    """Communication of this generation was ended; the message says by whom and why."""


class CommTimeout(RuntimeError):
    """A peer did not answer in time; the message says what was awaited, and which ranks are silent or busy.

    culprits: these ranks; where all answer that they wait themselves, nobody.
    """

    def __init__(self, message: str, culprits: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(culprits)
