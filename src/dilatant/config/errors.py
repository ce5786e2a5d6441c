"""UserError: the error that a user can fix.

Any mistake in the user's input (a key, a file, a sample, a plan) is a `UserError`, whose text says what is wrong,
where, and what to do. The command line prints it without a stack trace and exits with code 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from opcode import opmap

from dilatant.config.printable import masked


class UserError(ValueError):
    """A mistake in the user's input; the message names the place and the remedy. Secrets in addresses are masked."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


def list_problems(title: str, problems: Sequence[str]) -> UserError:
    """Return one error for several problems: `title`, then one line for each problem."""
    return UserError("\n".join([title, *(f"  - {problem}" for problem in problems)]))


def one_line(error: Exception, most: int = 300) -> str:
    """Return an error's text in one line of at most `most` characters."""
    return masked(" ".join(str(error).split()))[:most] or type(error).__name__


@contextmanager
def as_user_error(what: str, *types: type[Exception]) -> Iterator[None]:
    """Raise errors of these types (by default, any Exception) inside the context as a UserError: `what`, then the
    error's text in one line."""
    wanted = types or (Exception,)
    try:
        yield
    except wanted as error:
        raise UserError(f"{what}: {one_line(error)}") from None


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Raise an OSError inside the context, such as that of a full disk, as a UserError: `what`, then the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None


@contextmanager
def own_code(what: str, *types: type[BaseException]) -> Iterator[None]:
    """Raise errors of these types (by default, any), which the user's code inside the context raises, as a UserError:
    `what`, the error and its place. SystemExit must not end a run silently. A UserError passes, and Ctrl-C."""
    wanted = types or (BaseException,)
    try:
        yield
    except UserError:
        raise
    except wanted as error:
        last = error.__traceback__
        assert last is not None
        while last.tb_next is not None:
            last = last.tb_next
        code = last.tb_frame.f_code
        is_signal = code.co_code[last.tb_lasti] != opmap["RAISE_VARARGS"]  # its handler runs between instructions
        if isinstance(error, KeyboardInterrupt) and is_signal:
            raise
        file = os.path.basename(code.co_filename)
        place = "" if file.startswith("<") else f" ({file}:{last.tb_lineno})"
        raise UserError(f"{what}: {type_and_text(error)}{place}") from error


def type_and_text(error: BaseException) -> str:
    """Return an error's type and its text, of at most 200 characters, in one line."""
    text = masked(" ".join(str(error).split()))[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of(error: Exception, what: str) -> str:
    """Return the reason for a user: an error of ours in its own words, another one as `what` and, in parentheses, the
    error."""
    return one_line(error) if isinstance(error, UserError) else f"{what} ({type_and_text(error)})"
