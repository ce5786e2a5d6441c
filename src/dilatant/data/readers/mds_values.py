"""Columns of MosaicML's MDS shards: the bytes of a value by the name of its encoding.

The encodings are those of mosaicml-streaming 0.13 (streaming/base/format/mds/encodings.py); numbers are little-endian.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np

from dilatant.data.readers.arrow_records import short_number
from dilatant.data.readers.python_records import plain

_TYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32",
                 "float64")
}  # fmt: skip
_SCALARS: Mapping[str, np.dtype[Any]] = {"int": np.dtype("<i8"), **_TYPES}
_CODES = {8 * kind.itemsize + {"u": 0, "i": 1, "f": 2}[kind.kind]: kind for kind in _TYPES.values()}
"""The number that an array's bytes give for their type: its bits, and 1 more for signed and 2 more for floating."""
_PIXEL_BYTES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "YCbCr": 3, "CMYK": 4, "I;16": 2}
"""Modes of raw pictures. A palette picture is stored without its palette."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """Type and shape of arrays as the encoding says them; None for what each value says itself."""

    kind: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    @staticmethod
    def of(encoding: str) -> ArrayType:
        """Parse `ndarray`, `ndarray:int32` or `ndarray:int32:2,3`. Raises ValueError."""
        _, *about = encoding.split(":")
        if len(about) > 2 or (about and about[0] not in _TYPES):
            raise ValueError(f"{encoding!r} is no type of arrays")
        shape = tuple(map(int, about[1].split(","))) if len(about) == 2 else None
        if shape is not None and min(shape) < 1:
            raise ValueError(f"{encoding!r} has a side below 1")
        return ArrayType(_TYPES[about[0]] if about else None, shape)

    def value(self, data: bytes) -> list[Any]:
        """Return an array as lists of numbers. Raises ValueError."""
        at, kind, shape = 0, self.kind, self.shape
        if kind is None:
            if data[:1] == b"" or data[0] not in _CODES:
                raise ValueError("an array of an unknown type")
            at, kind = 1, _CODES[data[0]]
        if shape is None:
            head = data[at] if at < len(data) else 0
            width = 1 << (head & 3)
            end = at + 1 + (head >> 2) * width
            shape = tuple(np.frombuffer(data[at + 1 : end], f"<u{width}").tolist())
            at = end
            if len(shape) != head >> 2 or not shape:
                raise ValueError("an array without its shape")
        if math.prod(shape) * kind.itemsize != len(data) - at:
            raise ValueError(f"an array of shape {shape} in {len(data) - at:,} bytes")
        found: list[Any] = np.frombuffer(data, kind, offset=at).reshape(shape).tolist()
        return found


def fixed_bytes(encoding: str) -> int | None:
    """Return the bytes of every value of an encoding; None if they differ. Raises ValueError for an encoding that is
    not known, and for pickled objects, which run code when they are read."""
    if encoding in _SCALARS:
        return _SCALARS[encoding].itemsize
    if encoding.partition(":")[0] == "ndarray":
        about = ArrayType.of(encoding)
        return None if about.kind is None or about.shape is None else math.prod(about.shape) * about.kind.itemsize
    if encoding == "pkl":
        raise ValueError("its encoding 'pkl' may run any code when it is read; write it as json, bytes or jpeg")
    if encoding not in _DECODERS:
        raise ValueError(f"its encoding {encoding!r} is not known here")
    return None


def value_of(encoding: str, data: bytes) -> Any:
    """Return a value as records hold it: pictures stay encoded. Raises ValueError for bytes that are none."""
    if encoding in _SCALARS:
        number = np.frombuffer(data, _SCALARS[encoding])[0]
        return number.item() if number.dtype.kind in "iu" else short_number(8 * number.itemsize, number.item())
    try:
        return _DECODERS[encoding](data) if encoding in _DECODERS else ArrayType.of(encoding).value(data)
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} in {data[:20]!r}") from None


def _items(data: bytes, at: int) -> list[bytes]:
    """Split a list: at byte `at` the number of items, then the bytes of each, both as uint32, then the items."""
    count = int.from_bytes(data[at : at + 4], "little")
    begin = at + 4 + 4 * count
    if len(data) < begin:
        raise ValueError(f"a list of {count:,} items in {len(data):,} bytes")
    ends = begin + np.cumsum(np.frombuffer(data[at + 4 : begin], "<u4"), dtype=np.int64)
    bounds = [begin, *ends.tolist()]
    if bounds[-1] != len(data):
        raise ValueError(f"a list whose items end at byte {bounds[-1]:,} of {len(data):,}")
    return [data[first:end] for first, end in pairwise(bounds)]


def _picture(data: bytes) -> Any:
    """Return a raw picture (width, height and length of the mode as uint32, the mode, the pixels) as a PNG."""
    from PIL import Image

    width, height, length = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 8))
    mode = data[12 : 12 + length].decode() if length < 8 else ""
    if mode not in _PIXEL_BYTES:
        raise ValueError(f"a raw picture of the mode {mode!r}, which is not read")
    if width * height * _PIXEL_BYTES[mode] != len(data) - 12 - length or not width * height:
        raise ValueError(f"a raw picture of {width} x {height} {mode} in {len(data):,} bytes")
    return plain(Image.frombytes(mode, (width, height), data[12 + length :]))


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "png": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "pil": _picture,
    "list[pil]": lambda data: [_picture(item) for item in _items(data, 4)],
    "list[jpeg]": lambda data: _items(data, 4),
    "list[png]": lambda data: _items(data, 4),
    "jpeg_array": lambda data: _items(data, 0),
    "jpegarray": lambda data: _items(data, 0),
}
