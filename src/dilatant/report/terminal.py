"""Terminal lines and tables without markup: user text is shown as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


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


def print_table(console: Console, table: Table) -> None:
    """Print the table with its cells unchanged."""
    console.print(table, markup=False, highlight=False)
