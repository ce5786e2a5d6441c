"""Lines for the user that hold text of the user's: paths, names, ids, messages. Brackets in it are just brackets."""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from dilatant.config.printable import printable

PROGRESS_SECONDS = 5.0


class Terminal(Console):
    """The console of every command: what users and files wrote cannot move the cursor, colour or retitle anything."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_anything() -> None:
    """Let standard output and errors show a character that their encoding lacks by its number, not fail at it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def open_console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console that reads no markup, in lines and cells of tables alike, and prints any character.

    A notebook gets the lines of a pipe: rich's own displays there ask for ipywidgets, and are empty without.
    """
    print_anything()
    return Terminal(stderr=stderr, quiet=quiet, markup=False, force_jupyter=False)


def say(console: Console, text: str, style: str = "") -> None:
    """Print `text` as it is, unwrapped."""
    console.print(Text(text, style=style), soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print `warning: text`."""
    console.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)


@contextmanager
def show_progress(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text`, what is being done, and what the function in its place is called with. On a terminal it is one line
    that changes; elsewhere a line for each new task, which is the text up to a colon, and of one task a line every
    PROGRESS_SECONDS."""
    if console.is_terminal and not console.is_dumb_terminal:
        with console.status(text) as status:
            yield status.update
        return
    due = dict[str, float]()

    def tell(text: str) -> None:
        task, _, _ = text.partition(":")
        if time.monotonic() >= due.get(task, 0.0):
            say(console, text)
            due[task] = time.monotonic() + PROGRESS_SECONDS

    tell(text)
    yield tell


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Inside, a warning for users (UserWarning, of a library too) is a line that is said once, without its place in the
    code; others are not shown. Where Python was told what to do with warnings (-W, PYTHONWARNINGS), it does that."""
    if sys.warnoptions:
        yield
        return
    said = set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            warn(console, text)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield
