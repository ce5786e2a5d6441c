"""Remote files: addresses such as s3://bucket/folder, which fsspec lists and reads by ranges of bytes.

`RemotePath` is a path of which readers ask what they ask of any path; `open_data` and `map_file` open both kinds.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Self

from dilatant.config.errors import UserError, as_user_error, one_line, type_and_text
from dilatant.config.files.own_files import open_regular
from dilatant.config.printable import MASK, masked

FIRST_BYTES = 64 << 10
"""Bytes of the first request at a place, which hold the header of most media."""
MOST_BYTES = 8 << 20
"""Bytes of a request while a file is read from its beginning to its end."""
NOTICED_BYTES = 1 << 30
"""Size of a remote file from which its copy on this machine is announced."""
VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "blob_id", "LastModified", "Last-Modified",
            "last_modified", "updated", "mtime", "created")  # fmt: skip
"""What file systems call a file's version: its content's digest if there is one, else the time of writing."""
_ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.\-]+:/+")


def is_address(text: str) -> bool:
    """Return True for an address such as s3://bucket/key, and False for a path of this machine."""
    return _ADDRESS.match(text) is not None and "://" in text


class RemotePath(PosixPath):
    """A path in a file system of fsspec; its text is the address. Picklable.

    Only the methods below ask the file system, and raise OSError; UserError without the protocol's package. Servers of
    HTTP cannot be listed: there, nothing is a folder and no pattern matches.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    @property
    def is_web(self) -> bool:
        return self.parts[0] in ("http:", "https:")

    @property
    def place(self) -> tuple[str, ...]:
        """Protocol and bucket, server or container."""
        return self.parts[:2]

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return size and kind; the time of modification is a number that changes with the file's version."""
        about = self._about()
        if about["type"] == "directory":
            return os.stat_result((stat.S_IFDIR, *(0,) * 9), {"st_mtime_ns": 0})
        if about.get("size") is None:
            raise OSError(0, f"the server of {self} does not say how long the file is")
        version = next((str(about[name]) for name in VERSIONS if about.get(name)), "")
        number = int.from_bytes(hashlib.sha256(version.encode()).digest()[:7], "big")
        return os.stat_result((stat.S_IFREG, *(0,) * 5, about["size"], 0, 0, 0), {"st_mtime_ns": number})

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() != ""

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "file"

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "directory"

    def resolve(self, strict: bool = False) -> Self:
        return self

    def rglob(self, pattern: str = "*", **_: Any) -> Generator[Self, None, None]:
        """Yield all files below; readers ask for no other pattern."""
        assert pattern == "*"
        yield from self._below("find")

    def glob(self, pattern: str, **_: Any) -> Generator[Self, None, None]:
        """Yield the files whose path below this one fits the pattern."""
        yield from self._below("glob", pattern)

    def read_range(self, start: int, length: int) -> bytes:
        """Return bytes of the file by one request."""
        with self._system() as (system, name):
            if self.is_web:  # a server may send all of a file instead, which only the stream notices in time
                with system.open(name, "rb", cache_type="none", size=start + length) as file:
                    file.seek(start)
                    data: bytes = file.read(length)
            else:
                data = system.cat_file(name, start=start, end=start + length)
        if len(data) != length:
            raise OSError(errno.EIO, f"{self}: {len(data):,} of {length:,} bytes came")
        return data

    def _kind(self) -> str:
        """Return "file", "directory", or "" for neither."""
        try:
            return "file" if self._about()["type"] != "directory" else "directory"
        except FileNotFoundError:
            return ""

    def _about(self) -> dict[str, Any]:
        with self._system() as (system, name):
            return dict(system.info(name))

    def _below(self, ask: str, pattern: str = "") -> Iterator[Self]:
        if self.is_web:
            return
        with self._system() as (system, name):
            name = name.rstrip("/")
            found = getattr(system, ask)(f"{name}/{pattern}" if pattern else name, detail=True)
        names = (file for file, about in found.items() if file != name and about["type"] != "directory")
        yield from (self / file[len(name) :].lstrip("/") for file in names)

    @contextmanager
    def _system(self) -> Iterator[tuple[Any, str]]:
        """Give the file system and the file's name there. Inside the context, its errors become OSErrors."""
        address, shown = str(self), masked(str(self))
        if MASK in address:
            raise UserError(
                f"{address!r} lacks its credentials, which stay with the person who started the run; give the whole "
                "address, as in --set data.train.0.path=ADDRESS"
            )
        if "::" in address:
            raise UserError(f"{address!r} chains file systems, which is not supported; name the files themselves")
        try:
            from fsspec.core import url_to_fs

            found = url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{address!r} cannot be opened: {one_line(error)}; pip install 'dilatant[remote]' brings S3, Google "
                "Cloud Storage and HTTP, and other protocols have packages of their own"
            ) from None
        try:
            yield found
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, masked(f"{address}: {one_line(error)}")) from None
        except Exception as error:  # each package raises errors of its own, most of them about the network
            raise OSError(errno.EIO, masked(f"{address}: {type_and_text(error)}")) from None


class _Ranges(io.RawIOBase):
    """A remote file of `size` bytes that is read by ranges: short ones after a jump, longer ones while reading goes
    on."""

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._position = self._start = 0
        self._chunk = b""
        self._next = FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        if not self._start <= self._position < self._start + len(self._chunk):
            self._fetch(len(buffer))
        begin = self._position - self._start
        data = self._chunk[begin : begin + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _fetch(self, wanted: int) -> None:
        goes_on = self._chunk and self._position == self._start + len(self._chunk)
        self._next = min(8 * self._next, MOST_BYTES) if goes_on else FIRST_BYTES
        length = min(max(self._next, wanted), self._size - self._position)
        self._start = self._position
        self._chunk = self._path.read_range(self._start, length) if length > 0 else b""


def data_path(text: str) -> Path:
    """Return the path that a text names: an address, or a path of this machine, in which `~` is the user's home.
    Raises UserError for the home of an unknown user."""
    if _ADDRESS.match(text):
        return RemotePath(text)
    with as_user_error(f"{text!r} names no path", RuntimeError):  # `~name` of somebody who is not known here
        return Path(text).expanduser()


def is_folder(path: Path) -> bool:
    """Return True for a folder. A name that is too long, such as a pattern with many choices, is none."""
    return path.is_dir() if isinstance(path, RemotePath) else os.path.isdir(path)


def open_data(path: Path, end: int | None = None) -> BinaryIO:
    """Open a data file for reading, wherever it is. Raises OSError like `open_regular`.

    end: bytes that are known to be there. A remote file then ends there, and its server is not asked for its length.
    """
    if not isinstance(path, RemotePath):
        return open_regular(path)
    return io.BufferedReader(_Ranges(path, path.stat().st_size if end is None else end))


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file into memory for reading. A remote one is first copied to a file without a name in the folder for
    temporary files (TMPDIR), whose room is free again when the map ends. Raises OSError, and UserError without room."""
    if not isinstance(path, RemotePath):
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size, folder = path.stat().st_size, tempfile.gettempdir()
    if size > shutil.disk_usage(folder).free:
        raise UserError(
            f"{str(path)!r} has {size:,} bytes, which have to be here once to find its records, and {folder!r} lacks "
            "room for them; set TMPDIR, or write Parquet or tars, which are read in place"
        )
    if size > NOTICED_BYTES:
        warnings.warn(
            f"{masked(str(path))} ({size / 2**30:.1f} GiB) is copied to {folder} to find its records", stacklevel=1
        )
    with tempfile.TemporaryFile() as copy, open_data(path, size) as stream:
        shutil.copyfileobj(stream, copy, MOST_BYTES)
        copy.flush()
        return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
