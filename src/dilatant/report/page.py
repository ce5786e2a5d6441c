"""What all pages share: their assets, and templates that escape everything they are given."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any


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
