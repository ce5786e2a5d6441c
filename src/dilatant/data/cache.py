"""Cache: a folder of arrays that are computed once and shared by all processes and later runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import multiprocessing
import os
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.config.environment import cache_folder
from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import is_trusted_cache_file, open_regular

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
    header = json.dumps({"key": key, "about": content.about, "arrays": shapes, "digest": digest.hexdigest()}).encode()
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
    arrays = {name: np.ndarray(shape, dtype, mapped, offset) for name, (dtype, shape, offset) in places.items()}
    return Arrays(arrays, header.about, header.digest)


class _Header(msgspec.Struct):
    """Header of a file of arrays: dtype and shape of each by name. Other versions' headers may differ."""

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
    with suppress(OSError, ValueError):
        if beside.read_text(encoding="utf-8") == state:
            return True
    if hashlib.sha256(memoryview(mapped)[file.tell() :]).hexdigest() != digest:
        return False
    if time.time_ns() - about.st_ctime_ns > SETTLED_NS:
        with suppress(OSError):  # the checksum is then verified at every open
            os.fsync(file.fileno())  # or a crash could leave this mark for a file that never reached the disk
            write_durably(beside, state)
    return True


@dataclass(frozen=True, slots=True)
class Cache:
    """Arrays cached by name and key in a folder. Picklable.

    named: the user chose the folder, so failing to write there is an error; otherwise it is a warning.
    """

    folder: Path
    named: bool = False

    def known(self, name: str, key: str | None = None) -> Arrays | None:
        """Return the arrays cached under a name and key (None accepts any key). None means that they are missing,
        damaged, or another user's in a folder that everybody may write to."""
        path = self._path(name)
        return read_arrays(path, key) if is_trusted_cache_file(path) else None

    def kept(
        self, name: str, key: str, make: Callable[[], Arrays], valid: Callable[[Arrays], bool] = lambda _: True
    ) -> Arrays:
        """Return the arrays cached under a name and key, or compute them and replace that name's entry.

        One process computes while the others wait for its lock. valid: returns whether cached arrays may still be used.
        Raises UserError if a named folder cannot be written or a script has no main guard; and errors of `make`.
        """
        found = self.known(name, key)
        if found is not None and valid(found):
            return found
        _refuse_while_being_started()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock = os.fdopen(os.open(self._path(name).with_suffix(".lock"), flags, 0o666))
        except OSError as error:
            self._cannot_write(error)
            return make()
        with lock:  # the kernel releases a lock if its holder dies
            with suppress(OSError):  # without locks, several processes compute the arrays, and the last write wins
                fcntl.flock(lock, fcntl.LOCK_EX)
            found = self.known(name, key)
            if found is not None and valid(found):
                return found
            for left in self.folder.glob(f".{name}.*-*"):  # temporary files of a process killed while writing
                with suppress(OSError):
                    left.unlink()
            made = make()
            try:
                write_arrays(self._path(name), key, made)
            except OSError as error:
                self._cannot_write(error)
                return made
        return self.known(name, key) or made

    def forget(self, name: str) -> None:
        """Remove the arrays cached under a name, if any."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.arrays"

    def _cannot_write(self, error: OSError) -> None:
        problem = f"the index of the data cannot be written to {str(self.folder)!r}: {error.strerror or error}"
        remedy = "set 'data.cache_dir' to a folder with room"
        if self.named:
            raise UserError(f"{problem}; {remedy}") from None
        # stacklevel=1, so that the warning is shown once, whichever caller triggers it.
        warnings.warn(f"{problem}, so it is made again in every run; {remedy}", stacklevel=1)


def open_cache(cache_dir: str | Path | None) -> Cache:
    """Return the cache in the folder that the user names, or in the user's cache folder."""
    return Cache(Path(cache_dir), named=True) if cache_dir else Cache(cache_folder() / "sizes")


def _refuse_while_being_started() -> None:
    """Raise UserError while this process imports its parent's script: an unguarded script would wait here for a lock of
    the parent, which waits for this process."""
    if multiprocessing.parent_process() is None and multiprocessing.current_process().name != "MainProcess":
        raise UserError(
            "this script runs again in each process that reads data for it; put what it does under "
            "`if __name__ == '__main__':`"
        )
