"""The error a user can fix.

Anything wrong with what a user gave us (a key, a file, a sample, a plan) is a `UserError`: its text says what is
wrong, where, and what to do. The command line prints it without a stack trace and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in the user's input; the message names the place and the remedy."""


def list_problems(title: str, problems: Sequence[str]) -> UserError:
    """One error for several problems: `title`, then a line for each."""
    return UserError("\n".join([title, *(f"  - {problem}" for problem in problems)]))
