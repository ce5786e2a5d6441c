"""Array files: named numpy arrays in one checksummed file, memory-mapped by every process that reads it.

Only bytes covered by a checksum are trusted. After a whole file was verified once, its state (inode, size, times) is
recorded in a file next to it; later opens verify only the header as long as that state is unchanged.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.config.files.own_files import open_regular

MAGIC = b"DILARR01"
HEAD = struct.Struct("<8sQ32s")
"""Magic, bytes of the header, SHA-256 of the header."""
ALIGN = 64
SETTLED_NS = 100_000_000
"""A file is recorded as verified only at this age: file times tick in milliseconds, so a newer one may still change."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Arrays by name, with a JSON object that describes them. digest: the checksum if the arrays are read-only views of
    a file."""

    arrays: Mapping[str, NDArray[Any]]
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None


def write_arrays(path: Path, key: str, content: Arrays) -> None:
    """Write a file that `read_arrays` reads under this key; the file is replaced atomically. Raises OSError."""
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    shapes = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    digest = hashlib.sha256()
    for piece in _pieces(arrays):
        digest.update(piece)
    header = json.dumps(
        {"key": key, "about": content.about, "arrays": shapes, "digest": digest.hexdigest()}
    ).encode()
    header += b" " * (-(HEAD.size + len(header)) % ALIGN)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            file.write(HEAD.pack(MAGIC, len(header), hashlib.sha256(header).digest()) + header)
            for piece in _pieces(arrays):
                file.write(piece)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _pieces(arrays: Mapping[str, NDArray[Any]]) -> Iterator[memoryview | bytes]:
    """Yield the bytes of all arrays, each padded to a multiple of `ALIGN`."""
    for array in arrays.values():
        yield array.reshape(-1).view(np.uint8).data
        yield bytes(-array.nbytes % ALIGN)


def read_arrays(path: Path, key: str | None = None) -> Arrays | None:
    """Return the memory-mapped arrays of a file; None if it is missing, damaged, no array file, or has another key."""
    try:
        with open_regular(path) as file:
            header = _header(file)
            if header is None or key not in (None, header.key):
                return None
            places, end = _places(header.arrays, file.tell())
            if os.fstat(file.fileno()).st_size != end:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if not _is_whole(path, file, mapped, header.digest):
                return None
    except (OSError, ValueError):
        return None
    arrays = {
        name: np.ndarray(shape, dtype, mapped, offset) for name, (dtype, shape, offset) in places.items()
    }
    return Arrays(arrays, header.about, header.digest)


class _Header(msgspec.Struct):
    """What `write_arrays` writes of the arrays: dtype and shape of each by name. Other versions' headers may differ."""

    key: str
    about: dict[str, Any]
    arrays: dict[str, tuple[str, list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]]]]
    digest: str


def _header(file: BinaryIO) -> _Header | None:
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    magic, length, digest = HEAD.unpack(head)
    if magic != MAGIC or length > os.fstat(file.fileno()).st_size:
        return None
    text = file.read(length)
    return msgspec.convert(json.loads(text), _Header) if hashlib.sha256(text).digest() == digest else None


def _places(
    shapes: Mapping[str, tuple[str, list[int]]], start: int
) -> tuple[dict[str, tuple[np.dtype[Any], tuple[int, ...], int]], int]:
    """Return array name → (dtype, shape, offset of its first byte), and the offset at which the file ends."""
    places = {}
    for name, (type_name, shape) in shapes.items():
        dtype = _dtype(type_name)
        places[name] = (dtype, tuple(shape), start)
        length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        start += length + -length % ALIGN
    return places, start


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name. Raises ValueError unless it is boolean, integer or floating point."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ValueError(f"{name!r} names no type") from None
    if dtype.kind not in "biuf":
        raise ValueError(f"{name!r} is no type of plain numbers")
    return dtype


def _is_whole(path: Path, file: BinaryIO, mapped: mmap.mmap, digest: str) -> bool:
    """Return True if the arrays are those that were written, by an earlier verification or by their checksum."""
    about = os.fstat(file.fileno())
    state = json.dumps([about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, digest])
    beside = path.with_suffix(".checked")
    try:
        if beside.read_text(encoding="utf-8") == state:
            return True
    except (OSError, ValueError):
        pass
    if hashlib.sha256(memoryview(mapped)[file.tell() :]).hexdigest() != digest:
        return False
    if time.time_ns() - about.st_ctime_ns > SETTLED_NS:
        _remember(file, beside, state)
    return True


def _remember(file: BinaryIO, beside: Path, state: str) -> None:
    try:
        os.fsync(file.fileno())  # or a crash could leave this mark for a file that never reached the disk
        with tempfile.NamedTemporaryFile(dir=beside.parent, prefix=f".{beside.name}-", delete=False) as mark:
            mark.write(state.encode())
        os.replace(mark.name, beside)
    except OSError:
        pass  # the checksum is then verified at every open
