"""Parts of a page on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from dilatant.report.parts import Cell, Part, Table
from dilatant.report.say import plain_table, print_indented, print_line, print_table
from dilatant.report.text.wording import unbroken

_WIDE = 120
"""Console width from which tables show all columns."""
_ITEMS_SHOWN = 20


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    """Print what a page shows, without what only makes sense as a drawing."""
    for name, value in parts:
        if name == "section" and value.parts and value.in_terminal:
            print_line(console, (f"\n{value.title}", "bold"))
            print_parts(console, value.parts)
        elif name == "tiles":
            print_line(console, (" · ".join(f"{unbroken(figure)} {label}" for figure, label, _ in value), "dim"))
        elif name == "warnings":
            for text in value:
                print_line(console, ("warning: ", "yellow"), text)
        elif name == "summary":
            _print_items(console, value["sentences"])
            for text in value["advice"]:
                print_indented(console, ("→ ", "cyan"), text)
        elif name == "list":
            _print_items(console, value[1])
        elif name == "table":
            _print_table(console, value)
        elif name == "graph":
            for card in value["cards"]:
                print_indented(console, (card["name"], "bold"), f": {card['layout']} · {card['facts']}")
                _print_items(console, [box["title"] for box in card["boxes"]])
        elif name in ("charts", "throughput"):
            for chart in value if name == "charts" else [*reversed(value["lines"]), value["alive"]]:
                _print_chart(console, chart)


def _print_items(console: Console, texts: Sequence[str]) -> None:
    for text in texts[:_ITEMS_SHOWN]:
        print_indented(console, text)
    if len(texts) > _ITEMS_SHOWN:
        print_indented(console, f"and {len(texts) - _ITEMS_SHOWN} more")


def _print_chart(console: Console, chart: dict[str, Any]) -> None:
    if not (chart["sentence"] or chart.get("heights")):
        return
    facts = ", ".join(f"{name} {value}" for name, value in chart["facts"].items())
    print_indented(console, f"{chart['title']}: {chart['sentence'] or chart.get('text') or facts}")
    if not chart["sentence"]:
        print_indented(console, sparkline(chart["heights"]))


def _print_table(console: Console, table: Table) -> None:
    shown = [
        place
        for place, column in enumerate(table.columns)
        if (console.width >= _WIDE or column.style != "text")
        and not all(isinstance(row[place], Cell) and _is_plain_bar(row[place]) for row in table.rows)
    ]
    columns = [table.columns[place] for place in shown]
    titles = [column.label or column.title for column in columns]
    figures = {title for title, column in zip(titles, columns) if column.style.startswith("number")}
    printed = plain_table(titles, right=figures, whole=figures)
    for row in table.rows[: table.most]:
        printed.add_row(*(_text(row[place]) for place in shown))
    hidden = len(table.rows) - table.most
    if hidden > 0:
        printed.caption = f"{hidden} {table.more}"
    print_table(console, printed)


def _is_plain_bar(cell: Any) -> bool:
    return bool(cell.parts) and not (cell.parts[0]["name"] or cell.parts[0]["text"])


def _text(cell: str | Cell) -> Text:
    if isinstance(cell, str):
        return Text(cell)
    parts = ", ".join(f"{part['name']} {part['text']}".strip() for part in cell.parts or ())
    notes = [(f"\n{note}" if cell.text or parts else note, "dim") for note in cell.notes if note]
    return Text.assemble((cell.text + parts, "red" if cell.bad or cell.over else ""), *notes)


def sparkline(values: Sequence[float]) -> str:
    """Return values as eight heights of block characters; the largest is full, zero a blank."""
    tallest = max(values, default=0) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[min(int(8 * value / tallest + 0.999), 8)] for value in values)
