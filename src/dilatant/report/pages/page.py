"""Page rendering: one layout, common design and assets, and a template that escapes all values."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_named
from dilatant.report.pages.page_links import EMPTY
from dilatant.report.parts import Part

_TIMELINE_SCRIPTS = ("timeline_tree.js", "timeline_paint.js", "timeline.js")


def render(
    tab: str,
    title: str,
    subtitle: str,
    parts: Iterable[Part],
    footer: str,
    timelines: Sequence[dict[str, Any]] = (),
) -> str:
    """Render one HTML file that needs no network and opens from a disk.

    tab: title of the browser's tab. timelines: from `pack_chart`, one for each part `timeline`. All values are escaped;
    a missing one is an error rather than a blank. Only the page's own script may run in it.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("dilatant.report.pages", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = "\n".join(map(_asset, (*(_TIMELINE_SCRIPTS if timelines else ()), "page.js")))
    return environment.get_template("page.html").render(
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


def write_page(path: str | Path, text: str) -> Path:
    """Write a page, whole or not at all, and return its path. Raises UserError if it cannot be written.
    Paths that are not plain files (a link, /dev/stdout) are written through."""
    path = Path(path)
    try:
        write_named(path, text)
    except OSError as error:
        raise UserError(f"page {str(path)!r} cannot be written: {error.strerror}") from None
    return path


@cache
def _asset(name: str) -> str:
    return (files("dilatant.report.pages") / "assets" / name).read_text(encoding="utf-8")


def _script_safe(value: Any) -> str:
    """Return JSON that cannot end its script element and is valid in any JavaScript."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
