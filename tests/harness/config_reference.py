"""Reference of all config keys, as a Markdown page.

Written by `PYTHONPATH=src:tests python -m harness.config_reference > docs/config.md`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dilatant.config.config import Config

_HEAD = """# Every key of the YAML file

Written by `PYTHONPATH=src:tests python -m harness.config_reference > docs/config.md` from the code that reads the file.
`NAME` is a name of yours, `N` the number of a list's item, from 0. Any key may be set on the command line: `--set
train.steps=100`, `--set data.train.0.path=more.json`, `--set 'parallel={units: {vision: {}, language: {pp: 2}}}'`.
Paths in the file are relative to it, those of `--set` to the folder in which the command runs (a file that is only
beside the YAML file is found, too); `~`, `$NAME` and `${NAME}` are replaced in them. An unknown key is an error that
names the nearest one; a key that is written twice is an error, too.
"""


def reference() -> str:
    """Return the page in Markdown: for each section a table of key, values, default and meaning."""
    lines = [_HEAD]
    seen: dict[type[BaseModel], str] = {}
    for name, field in Config.model_fields.items():
        rows = list(_rows(name, field, seen))
        lines += [f"## {name}\n", "| key | values | default | |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _rows(path: str, field: Any, seen: dict[type[BaseModel], str]) -> Iterator[tuple[str, str, str, str]]:
    inner, place = _section(field.annotation)
    meaning = " ".join((field.description or "").split())
    if inner is None:
        yield f"`{path}`", _values(field.annotation), _default(field), meaning
        return
    if inner in seen:
        yield f"`{path}{place}`", f"as `{seen[inner]}`", "", meaning
        return
    seen[inner] = f"{path}{place}"
    for name, below in inner.model_fields.items():
        yield from _rows(f"{path}{place}.{name}", below, seen)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the section that a key leads to, and the path between: `.NAME` for a mapping, `.N` for a list."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation, ""
    origin = typing.get_origin(annotation)
    for argument in typing.get_args(annotation):
        inner, place = _section(argument)
        if inner is not None:
            return inner, {dict: ".NAME", tuple: ".N"}.get(origin, "") + place
    return None, ""


def _values(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None) or annotation is Any:
        return ""
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, map(_values, arguments)))
    if origin is typing.Annotated:
        return _values(arguments[0])
    if origin is tuple:
        return f"list of {_values(arguments[0])}"
    if origin is dict:
        return "mapping"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "`true`, `false`"}[annotation.__name__]


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ((), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
