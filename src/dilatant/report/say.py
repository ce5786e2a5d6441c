"""Console output of user text (paths, names, ids, messages) without markup: brackets are printed as they are.

Lines, tables, warnings, and the progress of a task.
"""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dilatant.config.printable import escaped, masked

PROGRESS_SECONDS = 5.0


class Terminal(Console):
    """Console of every command: in text from users and files, control characters have no effect, and secrets in
    addresses are masked."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = masked(renderable)
        elif isinstance(renderable, Text) and (shown := masked(renderable.plain)) != renderable.plain:
            renderable = Text(shown, renderable.style, end=renderable.end)  # before long lines are broken
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))


def print_anything() -> None:
    """Make stdout and stderr escape characters that their encoding lacks instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def open_console(stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that ignores markup, in lines and table cells, and prints any character.

    Notebooks get plain lines: rich's own displays there need ipywidgets, and are empty without them.
    """
    print_anything()
    return Terminal(stderr=stderr, quiet=quiet, markup=False, force_jupyter=False)


def say(console: Console, text: str, style: str = "") -> None:
    """Print `text` unchanged and unwrapped."""
    console.print(Text(text, style=style), soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print `warning: text`."""
    console.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)


@contextmanager
def show_progress(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` as the current task, and each text that the yielded function receives instead, or that kernels are
    compiled.
    On a terminal this is one changing line; elsewhere one line per new task (the text up to a colon), and for the same
    task one line every PROGRESS_SECONDS."""
    if console.is_terminal and not console.is_dumb_terminal:
        with console.status(text) as status, _compiling_shown(status.update):
            yield status.update
        return
    due = dict[str, float]()

    def tell(text: str) -> None:
        task, _, _ = text.partition(":")
        if time.monotonic() >= due.get(task, 0.0):
            say(console, text)
            due[task] = time.monotonic() + PROGRESS_SECONDS

    tell(text)
    with _compiling_shown(tell):
        yield tell


@contextmanager
def _compiling_shown(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell, once, that numba compiles planning kernels, which takes most of the time of an installation's first run."""
    from numba.core.event import Event, Listener, install_listener

    class Compiling(Listener):
        told = False

        def on_start(self, event: Event) -> None:
            if not self.told:
                self.told = True
                tell("compiling the planner's kernels, once for this installation")

        def on_end(self, event: Event) -> None:
            pass

    with install_listener("numba:compile", Compiling()):
        yield


@contextmanager
def warnings_as_lines(console: Console) -> Iterator[None]:
    """Inside the context, print each UserWarning (also of libraries) once as a line, without its source location.
    Other warnings are hidden. If Python has explicit warning options (-W, PYTHONWARNINGS), those apply instead."""
    if sys.warnoptions:
        yield
        return
    shown = set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = " ".join(str(message).split())
        if text not in shown:
            shown.add(text)
            warn(console, text)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def print_line(console: Console, *parts: str | tuple[str, str], wrap: bool = True) -> None:
    """Print a line of texts and (text, style)s; without `wrap` the terminal breaks it, so it can be copied whole."""
    console.print(Text.assemble(*parts), soft_wrap=not wrap)


def print_indented(console: Console, *parts: str | tuple[str, str]) -> None:
    """Print a paragraph with an indent of two columns."""
    console.print(Padding(Text.assemble(*parts), (0, 0, 0, 2)))


def plain_table(columns: Sequence[str], right: Collection[str] = (), whole: Collection[str] = ()) -> Table:
    """Return a table with a line under its header.
    Columns in `right` are right-aligned, those in `whole` never wrap, all others wrap long text."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(
            Text(name), justify="right" if name in right else "left", no_wrap=name in whole, overflow="fold"
        )
    return table


def print_facts(console: Console, title: str, facts: Mapping[str, object]) -> None:
    """Print facts below a title, one line each."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", min_width=16)
    table.add_column()
    for name, value in facts.items():
        table.add_row(name, str(value))
    console.print(table)


def print_table(console: Console, table: Table) -> None:
    """Print the table with its cells unchanged."""
    console.print(table, markup=False, highlight=False)
