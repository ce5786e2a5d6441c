"""How communication ends when it does not end well."""

from __future__ import annotations


class CommAborted(RuntimeError):
    """Communication of this generation was ended; the message says by whom and why."""


class CommTimeout(RuntimeError):
    """A peer did not answer in time; the message says what was awaited, and which ranks are silent or busy."""
