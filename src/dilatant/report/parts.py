"""Parts of a page as values: sections with tables, lists, legends and charts, which the macros of parts.html draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dilatant.report.text.wording import percent_text

HUES = 6
"""Number of hues in page.css for units, and for causes of idle time."""

Part = tuple[str, Any]
"""(macro of parts.html, its argument)."""


class Column(NamedTuple):
    """A column: heading, CSS class of its cells, and what precedes a cell on a narrow screen."""

    title: str = ""
    style: str = ""
    label: str = ""


def number(title: str, label: str | None = None) -> Column:
    """Return a column of right-aligned figures."""
    return Column(title, "number", title if label is None else label)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell. parts: of a bar, which is outlined if it is `over` its limit; interval: start and length of a mark on the
    bar, in percent. tone: colour of a swatch before the text. notes: lines below. bad: the text exceeds a limit."""

    text: str = ""
    parts: Sequence[Mapping[str, Any]] | None = None
    over: bool = False
    interval: tuple[float, float] | None = None
    tone: str = ""
    notes: Sequence[str] = ()
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first cell of a row is its heading. row_styles: CSS classes of rows. Rows after `most` are folded up
    as "N more `more`", or, if `more` is a sentence, left out and counted."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell]]
    style: str = "stack"
    row_styles: Sequence[str] = ()
    caption: str = ""
    legend: Sequence[Mapping[str, str]] = ()
    most: int = 1 << 30
    more: str = ""


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section with heading and note; `key` is unique on its page. Shown only if it has parts, and on a terminal only
    if it is `in_terminal`, without its note."""

    key: str
    title: str
    note: str = ""
    parts: Sequence[Part] = ()
    style: str = ""
    in_terminal: bool = True


def bar_part(name: str, fraction: float, tone: str, text: str = "") -> dict[str, Any]:
    """Return a part of a bar; `fraction` is of the bar's whole length, and its text by default."""
    percent = round(100 * fraction, 3)
    return {"name": name, "percent": percent, "tone": tone, "text": text or percent_text(fraction)}


def plain_bar(fraction: float, tone: str, title: str = "", interval: tuple[float, float] | None = None) -> Cell:
    """Return a bar of one part."""
    return Cell(parts=[{**bar_part("", fraction, tone), "text": title}], interval=interval)


def tiles(entries: Iterable[tuple[str, str, str]]) -> Part:
    """Return the row of large figures on top of a page: (value, label, CSS class)."""
    return "tiles", list(entries)


def summary(sentences: Iterable[str], title: str = "In short", advice: Sequence[str] = ()) -> Part:
    """Return the sentences on top of a page, with advice beside them if there is any."""
    return "summary", {"title": title, "sentences": list(sentences), "advice": list(advice)}


def legend(tones: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the entries of a legend, by name → CSS classes."""
    return [{"name": name, "tone": tone} for name, tone in tones.items()]
