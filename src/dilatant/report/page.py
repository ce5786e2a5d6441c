"""What all pages share: their assets, and templates that escape everything they are given."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = ("timeline_tree.js", "timeline_paint.js", "timeline.js", "page.js")


@cache
def asset(name: str) -> str:
    """The text of a file in report/assets."""
    return (files("dilatant.report") / "assets" / name).read_text(encoding="utf-8")


def template(name: str) -> Any:
    """A template of report/assets. A name that its values lack is an error rather than a blank."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dilatant.report", "assets")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def scripted(data: Any) -> dict[str, Any]:
    """What a page with timelines needs besides its own values: style, script, the script's hash, and its data."""
    from markupsafe import Markup

    script = "\n".join(asset(name) for name in _SCRIPTS)
    return {
        "style": Markup(asset("page.css")),
        "script": Markup(script),
        "script_hash": Markup(base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()),
        "data": Markup(_script_safe(data)),
    }


def _script_safe(value: Any) -> str:
    """JSON that cannot end the script element it stands in, and that is valid in any JavaScript."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
