"""A table of a paper next to ours: the paper's figure, ours, their ratio, and what to make of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True)
class PaperTable:
    """`columns` name what `rows` hold, in order. `basis` says what our figures are: measured or modelled, on what.

    `verdict` are sentences: where we agree, where not, and why.
    """

    name: str
    title: str
    basis: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    verdict: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.name

    def to_plain(self) -> dict[str, Any]:
        plain = asdict(self)
        plain["rows"] = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        del plain["columns"]
        return plain

    def show(self, console: Console) -> None:
        console.print(f"\n[bold]{escape(self.name)}[/]  {escape(self.title)}", highlight=False)
        console.print(f"[dim]{escape(self.basis)}[/]", highlight=False)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
        for index, column in enumerate(self.columns):
            numeric = all(isinstance(row[index], int | float | None) for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*(_text(value) for value in row))
        console.print(table)
        for sentence in self.verdict:
            console.print(f"  • {escape(sentence)}", highlight=False)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 4
        return f"{value:,.{digits}f}"
    return escape(str(value))
