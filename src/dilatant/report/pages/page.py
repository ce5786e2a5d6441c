"""Page rendering: one layout, common design and assets, and a template that escapes all values."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from dilatant.config.errors import file_errors
from dilatant.config.files.durable import write_named
from dilatant.config.printable import masked
from dilatant.plan import Plan
from dilatant.report.gantt import GanttChart
from dilatant.report.pages.page_links import EMPTY
from dilatant.report.parts import Part
from dilatant.report.text.wording import ranks_text


class Page(str):
    """The text of an HTML file, which a notebook shows in a frame."""

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 45em; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(self)}"></iframe>'


_TIMELINE_SCRIPTS = ("timeline_tree.js", "timeline_paint.js", "timeline.js")


def render(
    tab: str, title: str, subtitle: str, parts: Iterable[Part], footer: str, timelines: Sequence[dict[str, Any]] = ()
) -> Page:
    """Render one HTML file that needs no network and opens from a disk.

    tab: title of the browser's tab. timelines: from `pack_chart`, one for each part `timeline`. All values are escaped;
    a missing one is an error rather than a blank. Only the page's own script may run in it.
    """
    from markupsafe import Markup

    script = "\n".join(map(_asset, (*(_TIMELINE_SCRIPTS if timelines else ()), "page.js")))
    text = _page_template().render(
        tab=tab,
        title=title,
        subtitle=subtitle,
        parts=list(parts),
        footer=footer,
        links=Markup(EMPTY),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        script_hash=Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        data=Markup(_script_safe({"timelines": list(timelines)})),
    )
    return Page(text)


def pack_chart(timeline: GanttChart, plan: Plan, title: str, span: float | None = None) -> dict[str, Any]:
    """Return the data that `timeline.js` draws; `rows` has one base64 column for each field of `GanttRow`.

    span: seconds of the whole width, for charts that share a scale; default: the step's seconds. 131,072 actions (1,024
    ranks) take 3.7 MB of page; as objects they would take 15 MB.
    """
    units = [unit.name for unit in plan.units]
    sample_sets: dict[tuple[int, ...], int] = {}
    kinds: dict[str, int] = {}
    rows = sorted(timeline.rows, key=lambda row: (row.lane, row.start))
    samples = [sample_sets.setdefault(row.samples, len(sample_sets)) for row in rows]
    kind = [kinds.setdefault(row.kind, len(kinds)) for row in rows]
    return {
        "title": title,
        "seconds": timeline.seconds,
        "span": max(span or 0.0, timeline.seconds),
        "units": units,
        "stages": [
            [units.index(placed.unit), placed.replica, placed.position, placed.stage.first, placed.stage.end]
            for placed in plan.stages()
        ],
        "lanes": [{"ranks": ranks_text(lane.ranks), "stages": list(lane.stages)} for lane in timeline.lanes],
        "idle": [dict(idle) for idle in timeline.idle],
        "kinds": list(kinds),
        "samples": [list(numbers) for numbers in sample_sets],
        "rows": {
            "lane": _column([row.lane for row in rows], "<u4"),
            "stage": _column([row.stage for row in rows], "<i4"),
            "kind": _column(kind, "<u4"),
            "microbatch": _column([row.microbatch for row in rows], "<i4"),
            "samples": _column(samples, "<u4"),
            "start": _column([row.start for row in rows], "<f4"),
            "seconds": _column([row.seconds for row in rows], "<f4"),
        },
    }


def _column(values: list[Any], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=dtype).tobytes()).decode("ascii")


def write_page(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and return its path. Raises UserError if it cannot be written.
    Paths that are not plain files (a link, /dev/stdout) are written through."""
    path = Path(path)
    with file_errors(f"page {str(path)!r} cannot be written"):
        write_named(path, text)
    return path


@cache
def _page_template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dilatant.report.pages", "assets")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_shown
    )
    return environment.get_template("page.html")


def _shown(value: Any) -> Any:
    """Return what the template shows of a value."""
    return masked(value) if type(value) is str else value  # not Markup, which is ours


@cache
def _asset(name: str) -> str:
    return (files("dilatant.report.pages") / "assets" / name).read_text(encoding="utf-8")


def _script_safe(value: Any) -> str:
    """Return JSON that cannot end its script element and is valid in any JavaScript."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
