"""Links between the pages of a run folder, relative and only to pages that exist."""

from __future__ import annotations

from contextlib import suppress
from html import escape
from pathlib import Path
from urllib.parse import quote

from dilatant.config.files.durable import write_durably

PAGES = {
    "data.html": "Data",
    "plan/plan.html": "Plan",
    "plan/failures.html": "Failures",
    "timeline.html": "Last step",
    "plan.html": "Last step, simulated",
    "generations.html": "Losses and recoveries",
    "metrics.jsonl": "Figures of every step",
}
"""Files of a run folder for a browser → text of the link; paths are relative to the folder."""

_BEGIN, _END = "<!--links-->", "<!--/links-->"
EMPTY = f"{_BEGIN}{_END}"
"""Links of a page that stands alone. User text is escaped, so a page holds these marks once."""


def is_page(text: str) -> bool:
    """Return True if `text` is a page that Dilatant wrote."""
    return text.startswith("<!doctype html>") and _BEGIN in text and _END in text


def link_pages(folder: Path) -> None:
    """Write links to all existing pages into every page of a run folder.

    Files that are not Dilatant's pages, or cannot be read or written, stay unchanged.
    """
    there = [place for place in PAGES if (folder / place).is_file()]
    for place in there:
        with suppress(OSError, UnicodeDecodeError):
            _link(folder / place, _links(place, there))


def _link(page: Path, links: str) -> None:
    if page.suffix != ".html" or page.is_symlink():
        return
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    linked = f"{before}{begin}{links}{end}{after}"
    if end and linked != text:
        write_durably(page, linked)


def _links(here: str, there: list[str]) -> str:
    up = "../" * here.count("/")
    items = [
        f'<a aria-current="page">{escape(PAGES[place])}</a>'
        if place == here
        else f'<a href="{escape(quote(up + place))}">{escape(PAGES[place])}</a>'
        for place in there
    ]
    return f'<nav aria-label="Pages of this run">{"".join(items)}</nav>' if len(items) > 1 else ""
