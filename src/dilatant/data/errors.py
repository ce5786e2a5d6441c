"""Errors that name the sample or the medium that is wrong, and what to do about it."""

from __future__ import annotations

from dilatant.config.errors import UserError

LONGEST = 500
"""Characters of a message about a sample, which may quote what the sample holds."""


class SampleError(UserError):
    """A sample that cannot be trained on. It survives pickling, as it comes from worker processes."""

    def __init__(self, sample: str, problem: str, remedy: str = "") -> None:
        sample, problem = _printable(sample), _printable(problem)
        super().__init__(f"{sample}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.sample, self.problem, self.remedy = sample, problem, remedy

    def __reduce__(self) -> tuple[type[SampleError], tuple[str, str, str]]:
        return SampleError, (self.sample, self.problem, self.remedy)


class MediaError(UserError):
    """An image or a sound that cannot be read."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[type[MediaError], tuple[str, str]]:
        return MediaError, (self.problem, self.remedy)

    def of(self, sample: str) -> SampleError:
        """The same, as an error of the sample that holds the medium."""
        return SampleError(sample, self.problem, self.remedy)


def _printable(text: str) -> str:
    """A text that quotes data, short and such that any terminal and file takes it."""
    short = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in short
    )
