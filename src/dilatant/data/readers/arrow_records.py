"""Arrow files (written by `datasets.save_to_disk` or Feather): memory-mapped and read by row number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dilatant.config.errors import as_user_error, type_and_text
from dilatant.data.errors import SampleError
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import MOST_CHARACTERS, Blocks
from dilatant.data.readers.source_files import RecordsOfFiles, Scan


class ArrowRecords(RecordsOfFiles):
    """Rows of several Arrow files. Picklable: another process maps the same files."""

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        if file not in self._tables:
            self._tables[file] = _mapped(self._files.paths[file])
        return row_fields(self._tables[file], number, place)

    @cached_property
    def _tables(self) -> dict[int, Any]:
        return {}


class TableRecords:
    """Rows of a `datasets.Dataset`, memory-mapped. Picklable: worker processes map the same files. folder: base of
    relative paths. fingerprint: changes with the data."""

    blocks: Blocks | None = None

    def __init__(self, name: str, dataset: Any, folder: Path = Path(".")) -> None:
        self._name, self._folder = name, folder
        self.fingerprint: str = dataset._fingerprint
        # In this format nothing is decoded: images and sounds stay encoded bytes or paths.
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def name_of(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    def read(self, index: int) -> FileRecord:
        place = self.name_of(index)
        return FileRecord(place, self._folder, row_fields(self._dataset[index : index + 1], 0, place))


def scan_arrow(path: Path, name: str) -> Scan:
    """Count the rows of a file. Raises UserError naming a file that cannot be read."""
    from pyarrow import ArrowException

    with as_user_error(f"{name} cannot be read as Arrow", OSError, ValueError, ArrowException):
        rows = _mapped(path).num_rows
    return Scan(rows, {"rows": np.array([rows], np.int64)})


def _mapped(path: Path) -> Any:
    """Return the table of a file; its buffers are views of the memory-mapped file."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).read_all()


MOST_ROW_BYTES = 1 << 30
"""Bytes of a column in one row, media included."""
LONGEST_LIST = 64
"""Longest list whose numbers are shortened; longer lists are vectors, which are not text."""
Convert = Callable[[Any], Any]


def row_fields(table: Any, row: int, place: str) -> dict[str, Any]:
    """Return a row of an Arrow table as column → value. Raises SampleError if a value is above the size limits."""
    import pyarrow as pa

    one = table.slice(row, 1)
    for name, column in zip(one.column_names, one.columns):
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        most = 4 * MOST_CHARACTERS if is_text else MOST_ROW_BYTES
        if column.nbytes > most:
            raise SampleError(
                place, f"{name!r} has {column.nbytes:,} bytes, more than the {most:,} allowed", "cut it into pieces"
            )
    convert = converters(table.schema)
    try:
        fields: dict[str, Any] = one.to_pylist()[0]
    except (ValueError, OverflowError, LookupError) as error:  # no UTF-8, a date beyond Python's or an unknown zone
        raise SampleError(place, f"cannot be read: {type_and_text(error)}", "write the file again") from None
    if len(fields) < one.num_columns:
        raise SampleError(place, "has two columns of one name", "rename one of them")
    return {name: convert[name](value) if name in convert else value for name, value in fields.items()}


@lru_cache(maxsize=64)
def converters(schema: Any) -> Mapping[str, Convert]:
    """Return the conversions of columns by name; columns whose values stay as they are have none.

    schema: an Arrow schema with the metadata of `datasets`, which names class labels. The functions are picklable.
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
    """Return the conversion for values of the Arrow type `kind`. feature: their description by `datasets`."""
    import pyarrow as pa

    about = feature if isinstance(feature, Mapping) else {}
    if about.get("_type") == "ClassLabel" and isinstance(about.get("names"), list):
        return partial(_class_name, tuple(about["names"]))
    if pa.types.is_floating(kind):
        return partial(short_number, kind.bit_width)
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
    """Return the name of a class; None for -1, which `datasets` writes for a missing label."""
    if isinstance(value, list):
        return [_class_name(names, item) for item in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None


def short_number(bits: int, value: Any) -> Any:
    """Return a whole number as an int (a column with nulls stores ints as floats), and another float with the fewest
    digits that identify it in its precision."""
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
