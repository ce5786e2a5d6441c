"""Errors that name the sample or media item at fault and the remedy."""

from __future__ import annotations

import errno

from dilatant.config.errors import UserError
from dilatant.config.printable import masked

_OF_THE_MACHINE = frozenset(
    getattr(errno, name)
    for name in ("EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH",
                 "ECONNRESET", "EBUSY", "EAGAIN", "ENOMEM", "ENFILE", "EMFILE")
    if hasattr(errno, name)
)  # fmt: skip

LONGEST = 500
"""Characters of a message about a sample, which may quote the sample's content."""


class SampleError(UserError):
    """A sample that cannot be trained on. Picklable, so that worker processes can return it.

    may_pass: the cause may be a disk or a file server, so the next attempt may succeed.
    """

    def __init__(self, sample: str, problem: str, remedy: str = "", may_pass: bool = False) -> None:
        sample, problem = _printable(sample), _printable(problem)
        super().__init__(f"{sample}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.sample, self.problem, self.remedy, self.may_pass = sample, problem, remedy, may_pass

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, str, str, bool]]:
        return SampleError, (self.sample, self.problem, self.remedy, self.may_pass)


class MediaError(UserError):
    """An image, sound or clip that cannot be read. may_pass: see `SampleError`."""

    def __init__(self, problem: str, remedy: str = "", may_pass: bool = False) -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy, self.may_pass = problem, remedy, may_pass

    def __reduce__(self) -> tuple[type[MediaError], tuple[str, str, bool]]:
        return MediaError, (self.problem, self.remedy, self.may_pass)

    def of(self, sample: str) -> SampleError:
        """Return this error as the error of the sample that holds the media item."""
        return SampleError(sample, self.problem, self.remedy, self.may_pass)


def may_pass(error: Exception) -> bool:
    """Return True for an I/O error of the machine, False for one that the file itself causes each time."""
    return isinstance(error, OSError) and error.errno in _OF_THE_MACHINE


def _printable(text: str) -> str:
    """Shorten a text that quotes data and escape what a terminal or file could not show."""
    text = masked(text)
    short = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in short)
