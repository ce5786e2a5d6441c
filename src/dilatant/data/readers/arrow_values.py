"""Rows of Arrow tables as records: class labels by their names, numbers as a person would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from dilatant.data.errors import SampleError
from dilatant.data.readers.records import MOST_CHARACTERS

MOST_ROW_BYTES = 1 << 30
"""Of a row, its media included."""
LONGEST_LIST = 64
"""Longest list of numbers in which these are shortened: longer ones are vectors, which nobody reads."""
Convert = Callable[[Any], Any]


def row_fields(table: Any, row: int, place: str) -> dict[str, Any]:
    """A row of an Arrow table by column. Raises SampleError for one that is larger than any sample."""
    import pyarrow as pa

    one = table.slice(row, 1)
    for name, column in zip(one.column_names, one.columns):
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        most = 4 * MOST_CHARACTERS if is_text else MOST_ROW_BYTES
        if column.nbytes > most:
            raise SampleError(
                place,
                f"{name!r} has {column.nbytes:,} bytes, more than the {most:,} allowed",
                "cut it into pieces",
            )
    convert = converters(table.schema)
    fields: dict[str, Any] = one.to_pylist()[0]
    return {name: convert[name](value) if name in convert else value for name, value in fields.items()}


@lru_cache(maxsize=64)
def converters(schema: Any) -> Mapping[str, Convert]:
    """What to do with the values of columns, by name; columns whose values stay as they are, are left out.

    schema: of Arrow, with the metadata of `datasets`, which has the names of class labels. Functions can be pickled.
    """
    features = _features(schema)
    found = ((field.name, _converter(field.type, features.get(field.name))) for field in schema)
    return {name: convert for name, convert in found if convert is not None}


def _features(schema: Any) -> Mapping[str, Any]:
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, Mapping) else {}


def _converter(kind: Any, feature: Any) -> Convert | None:
    """kind: the Arrow type of the values. feature: what `datasets` says of them."""
    import pyarrow as pa

    about = feature if isinstance(feature, Mapping) else {}
    if about.get("_type") == "ClassLabel" and isinstance(about.get("names"), list):
        return partial(_class_name, tuple(about["names"]))
    if pa.types.is_floating(kind):
        return partial(_short_number, kind.bit_width)
    if pa.types.is_struct(kind):
        inner = about.get("feature") if about.get("_type") == "Sequence" else about
        inner = inner if isinstance(inner, Mapping) else {}
        fields = [kind.field(at) for at in range(kind.num_fields)]
        found = {
            field.name: convert
            for field in fields
            if (convert := _converter(field.type, inner.get(field.name))) is not None
        }
        return partial(_struct, found) if found else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        of_items = feature[0] if isinstance(feature, list) and feature else about.get("feature", about)
        convert = _converter(kind.value_type, of_items)
        return partial(_list, convert) if convert is not None else None
    return None


def _class_name(names: tuple[str, ...], value: Any) -> Any:
    """The name of a class; nothing for -1, by which `datasets` says that there is none."""
    if isinstance(value, list):
        return [_class_name(names, item) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def _short_number(bits: int, value: Any) -> Any:
    """A whole number without a point, which a column with nulls makes floats of; others with as few digits as tell them
    apart in their precision."""
    if value is None or not np.isfinite(value):
        return value
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return value if bits == 64 else float(str((np.float16 if bits == 16 else np.float32)(value)))


def _struct(converters: Mapping[str, Convert], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: converters[name](inner) if name in converters else inner for name, inner in value.items()}


def _list(convert: Convert, value: Any) -> Any:
    if not isinstance(value, list) or (len(value) > LONGEST_LIST and value and isinstance(value[0], float)):
        return value
    return [convert(item) for item in value]
