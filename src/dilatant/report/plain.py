"""Conversion of frozen dataclasses to plain JSON data and back, by their annotations."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

Value = TypeVar("Value")


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None; named tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def from_plain(kind: type[Value], data: Any, place: str = "$") -> Value:
    """Rebuild the `kind` that `to_plain` turned into `data`. Raises ValueError naming the place that does not fit."""
    return _decode(kind, data, place)


def _decode(kind: Any, data: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return None if data is None else _decode(inner[0], data, place)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, data, place)
    if origin is tuple:
        _expect(isinstance(data, list), "a list", data, place)
        return tuple(_decode(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), "an object", data, place)
        return {key: _decode(arguments[1], item, f"{place}.{key}") for key, item in data.items()}
    if origin is typing.Literal:
        _expect(data in arguments, f"one of {', '.join(map(str, arguments))}", data, place)
        return data
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = typing.get_type_hints(kind)
        _expect(isinstance(data, list) and len(data) == len(hints), f"a list of {len(hints)}", data, place)
        return kind(*(_decode(hint, item, place) for hint, item in zip(hints.values(), data, strict=True)))
    if kind is float:
        _expect(isinstance(data, int | float) and not isinstance(data, bool), "a number", data, place)
        return float(data)
    _expect(isinstance(data, kind), f"a value of type {kind.__name__}", data, place)
    return data


def _decode_fields(kind: Any, data: Any, place: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, place)
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(data) - set(hints)):
        raise ValueError(f"{place}: unknown keys {unknown}")
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(data)):
        raise ValueError(f"{place}: keys {missing} are missing")
    return kind(**{name: _decode(hints[name], item, f"{place}.{name}") for name, item in data.items()})


def _expect(fits: bool, wanted: str, data: Any, place: str) -> None:
    if not fits:
        raise ValueError(f"{place}: expected {wanted}, found {type(data).__name__}")
