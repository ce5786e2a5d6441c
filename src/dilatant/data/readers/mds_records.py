"""MosaicML's MDS shards, read by sample number: the index of a data set, and the shards, plain or compressed.

A shard is the number of samples, the offsets of their ends, both as uint32, the columns as JSON, and the samples. A
sample is the bytes of each column of varying length as uint32, then the values. A compressed shard can only be unpacked
whole, so it is a block of records that are read together.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.files.remote_files import RemotePath, open_data
from dilatant.data.errors import SampleError, may_pass
from dilatant.data.readers.mds_values import fixed_bytes, value_of
from dilatant.data.readers.records import Blocks
from dilatant.data.readers.source_files import (
    Catalog,
    Scan,
    SourceFiles,
    SpannedRecords,
    choose_split,
    json_object,
    path_inside,
    read_description,
)

INDEX = "index.json"
CODECS: Mapping[str, str] = {".zstd": "zstd", ".gz": "gzip", ".bz2": "bz2", ".br": "brotli"}
"""Suffix of a compressed shard → pyarrow's name for the codec."""
CACHE_BYTES = 256 << 20
"""Bytes of unpacked shards that a process keeps."""
MOST_SHARD_BYTES = 1 << 30
"""Bytes of an unpacked shard."""
MOST_SAMPLES = 1 << 26
"""Samples of a compressed shard, whose offsets are unpacked before its length is known."""
MOST_COLUMN_BYTES = 1 << 20
"""Bytes of the JSON that describes columns."""
REWRITE = "write the shards again, or fetch them again"

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class _File(msgspec.Struct):
    basename: str
    bytes: _Count
    hashes: dict[str, str] = {}


class _Shard(msgspec.Struct):
    format: str
    samples: _Count
    raw_data: _File
    version: int
    compression: str | None = None
    zip_data: _File | None = None


class Column(NamedTuple):
    """A column of a shard. size: bytes of each value, None if they differ."""

    name: str
    encoding: str
    size: int | None


class MdsRecords(SpannedRecords):
    """Samples of several shards. Picklable, without its unpacked shards.

    hashes: name of the algorithm and hexadecimal digest of compressed shards, by path. They are compared when a shard
    is unpacked.
    """

    def __init__(self, files: SourceFiles, hashes: Mapping[Path, tuple[str, str]] | None = None) -> None:
        super().__init__(files)
        self._hashes = hashes or {}
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._files, self._hashes)

    @cached_property
    def blocks(self) -> Blocks | None:
        """One block for each shard if any is compressed and they are larger than the cache, else None."""
        lengths = np.diff(self._files.first)
        total = sum(self._end(file) for file in np.flatnonzero(lengths).tolist())
        if total <= CACHE_BYTES or not any(path.suffix in CODECS for path in self._files.paths):
            return None
        lengths = lengths[lengths > 0]
        return Blocks(tuple(lengths.tolist()), max(1, CACHE_BYTES * len(lengths) // total))

    def raw(self, place: str, file: int, number: int) -> bytes:
        if self._files.paths[file].suffix not in CODECS:
            return super().raw(place, file, number)
        start, end = self._files.part("spans", file)[number].tolist()
        return self._shard(file, place)[start:end]

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        return _fields(place, self._files.part("columns", file).tobytes(), self.raw(place, file, number))

    def _end(self, file: int) -> int:
        return int(self._files.part("spans", file)[-1, 1])

    def _shard(self, file: int, place: str) -> bytes:
        """Return the content of a compressed shard. Raises SampleError."""
        if file not in self._unpacked:
            size = self._end(file)
            kept = sum(map(len, self._unpacked.values()))
            while self._unpacked and kept + size > CACHE_BYTES:
                kept -= len(self._unpacked.popitem(last=False)[1])
            self._unpacked[file] = self._unpack(self._files.paths[file], size, place)
        self._unpacked.move_to_end(file)
        return self._unpacked[file]

    def _unpack(self, path: Path, size: int, place: str) -> bytes:
        try:
            with _content(path) as stream:
                data: bytes = stream.read(size + 1)
        except (OSError, ValueError) as error:
            if may_pass(error):
                raise
            raise SampleError(place, f"its shard {path.name} cannot be unpacked: {error}", REWRITE) from None
        if len(data) != size:
            problem = f"its shard {path.name} unpacks to {'more' if len(data) > size else 'less'} than {size:,} bytes"
            raise SampleError(place, problem, REWRITE)
        algorithm, digest = self._hashes.get(path, ("", ""))
        if algorithm and _hash(algorithm)(data).hexdigest() != digest.lower():
            raise SampleError(place, f"its shard {path.name} has another {algorithm} than {INDEX} says", REWRITE)
        return data


def mds_catalog(place: Path, split: str | None, held_out: bool) -> Catalog | None:
    """Return the catalog of a folder of MDS shards, or of its index; None for anything else. A folder may hold a folder
    for each split. split, held_out: as for `find_files`. Raises UserError."""
    root = place if place.name == INDEX else place / INDEX
    below = [] if root == place else sorted(place.glob(f"*/{INDEX}"))
    found = {index: listed for index in (root, *below) if (listed := _shards_of(index)) is not None}
    passed_over: list[str] = []
    indexes = [root] if root in found and (split is None or len(found) == 1) else [*found.keys() - {root}]
    if not indexes:
        return None
    if indexes != [root]:
        indexes, passed_over = choose_split(place, sorted(indexes), split, held_out)
    paths: list[Path] = []
    shards: list[_Shard] = []
    for index in indexes:
        for number, said in enumerate(found[index]):
            with as_user_error(f"{str(index)!r}: shard {number} cannot be used", ValueError, msgspec.MsgspecError):
                shards.append(_checked(said))
                paths.append(_path_of(index.parent, shards[-1]))
    if not paths:
        raise UserError(f"data set {str(place)!r} is empty")
    twice = next((path for path, other in pairwise(sorted(paths)) if path == other), None)
    if twice is not None:
        raise UserError(f"{str(place)!r} names {twice.name} twice, so its samples would be there twice; name it once")
    files = [shard.zip_data if path.suffix in CODECS and shard.zip_data else shard.raw_data
             for path, shard in zip(paths, shards)]  # fmt: skip
    hashes = {path: min(shard.raw_data.hashes.items()) for path, shard in zip(paths, shards)
              if path.suffix in CODECS and shard.raw_data.hashes}  # fmt: skip
    return Catalog(
        str(indexes[0] if len(indexes) == 1 else place),
        tuple(paths),
        tuple(shard.samples for shard in shards),
        partial(MdsRecords, hashes=hashes),
        tuple(file.bytes for file in files),
        tuple(passed_over),
    )


def _shards_of(index: Path) -> list[Any] | None:
    """Return the shards that an index lists; None for a file that is missing or no index. Raises UserError for an index
    that is damaged."""
    text = read_description(index)
    if text is None or b'"shards"' not in text[:256]:
        return None
    with as_user_error(f"{str(index)!r} cannot be read as the index of MDS shards", ValueError):
        shards = json_object(text).get("shards")
        if not isinstance(shards, list):
            raise ValueError("its 'shards' is no list")
    return shards


def _checked(said: Any) -> _Shard:
    """Return a shard of an index. Raises ValueError for one that is not read here."""
    form = said.get("format") if isinstance(said, dict) else None
    if form != "mds":
        raise ValueError(f"it is of the format {form!r}, and only 'mds' is read; write it with MDSWriter")
    shard = msgspec.convert(said, _Shard)
    if shard.version != 2:
        raise ValueError(f"it is of version {shard.version}, and only version 2 is read")
    if shard.compression is not None and (shard.zip_data is None or _suffix(shard) not in CODECS):
        names = ", ".join(suffix[1:] for suffix in CODECS)
        raise ValueError(f"its compression {shard.compression!r} is none of {names}; write it with one of these")
    for algorithm in shard.raw_data.hashes if shard.compression is not None else ():
        _hash(algorithm)
    return shard


def _suffix(shard: _Shard) -> str:
    return "" if shard.zip_data is None else Path(shard.zip_data.basename).suffix


def _path_of(folder: Path, shard: _Shard) -> Path:
    """Return the file of a shard: the compressed one, unless it was unpacked in its folder."""
    raw = path_inside(folder, shard.raw_data.basename)
    if shard.compression is None or shard.zip_data is None:
        return raw
    return raw if not isinstance(raw, RemotePath) and raw.exists() else path_inside(folder, shard.zip_data.basename)


def _hash(name: str) -> Any:
    import xxhash

    found = getattr(xxhash, name, None) if name in xxhash.algorithms_available else None
    found = found or (partial(hashlib.new, name) if name in hashlib.algorithms_available else None)
    if found is None or name.startswith("shake"):
        raise ValueError(f"its hash {name!r} is not known here")
    return found


@contextmanager
def _content(path: Path) -> Iterator[Any]:
    """Give a stream of a shard's content, unpacked as it is read."""
    from pyarrow import CompressedInputStream

    codec = CODECS.get(path.suffix)
    with open_data(path) as stream:
        if codec is None:
            yield stream
            return
        with CompressedInputStream(stream, codec) as unpacked:
            yield unpacked


def scan_mds(path: Path, name: str) -> Scan:
    """Return the samples' places and the columns of a shard. Raises UserError naming a shard that is cut off, damaged
    or has columns that are not read.

    spans: first and end byte of every sample in the unpacked shard, int64 [records, 2]. columns: JSON, as bytes.
    """
    with as_user_error(f"{name} cannot be read as an MDS shard", OSError, ValueError, msgspec.MsgspecError):
        size = None if path.suffix in CODECS else path.stat().st_size
        with _content(path) as stream:
            count = int(_numbers(stream, 1)[0])
            if 4 * (count + 2) > (size or 4 * MOST_SAMPLES):
                raise ValueError(f"its header promises {count:,} samples, more than it can hold")
            ends = _numbers(stream, count + 1)
            length = int(ends[0]) - 4 * (count + 2)
            if not 0 <= length <= MOST_COLUMN_BYTES or (np.diff(ends) < 0).any():
                raise ValueError("its offsets are damaged")
            columns = stream.read(length)
        if len(columns) != length:
            raise ValueError("it is cut off")
        _columns(columns)
        if size is not None and size != ends[-1]:
            raise ValueError(f"it has {size:,} bytes, and its samples end at {ends[-1]:,}; it is cut off or damaged")
        if size is None and ends[-1] > MOST_SHARD_BYTES:
            raise ValueError(f"it unpacks to {ends[-1]:,} bytes, more than {MOST_SHARD_BYTES:,}; write smaller shards")
    return Scan(count, {"spans": np.stack([ends[:-1], ends[1:]], 1), "columns": np.frombuffer(columns, np.uint8)})


def _numbers(stream: Any, count: int) -> NDArray[np.int64]:
    data = stream.read(4 * count)
    if len(data) != 4 * count:
        raise ValueError("it is cut off")
    return np.frombuffer(data, "<u4").astype(np.int64)


@lru_cache(maxsize=64)
def _columns(text: bytes) -> Sequence[Column]:
    """Parse the columns that a shard describes. Raises ValueError naming a column that cannot be read."""
    about = json.loads(text)
    about = about if isinstance(about, dict) else {}
    names, encodings, sizes = (about.get(f"column_{key}") for key in ("names", "encodings", "sizes"))
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)):
        raise ValueError("it does not describe its columns")
    if not len(names) == len(encodings) == len(sizes) == len({*map(str, names)}):
        raise ValueError(f"its columns {names} are described wrongly, or one is there twice")
    columns = [Column(str(name), str(encoding), size or None) for name, encoding, size in zip(names, encodings, sizes)]
    for column in columns:
        try:
            fixed = fixed_bytes(column.encoding)
        except ValueError as error:
            raise ValueError(f"column {column.name!r}: {error}") from None
        if fixed != column.size:
            raise ValueError(f"column {column.name!r}: {column.encoding} has {fixed} bytes, not {column.size}")
    return columns


def _fields(place: str, about: bytes, data: bytes) -> dict[str, Any]:
    """Return the columns of a sample. Raises SampleError for bytes that do not fit them."""
    columns = _columns(about)
    at = 4 * sum(column.size is None for column in columns)
    lengths = iter(np.frombuffer(data[:at] if len(data) >= at else b"", "<u4").tolist())
    sizes = [next(lengths, 0) if column.size is None else column.size for column in columns]
    if at + sum(sizes) != len(data):
        problem = f"its columns take {at + sum(sizes):,} bytes, and it has {len(data):,}"
        raise SampleError(place, problem, REWRITE)
    fields: dict[str, Any] = {}
    for column, size in zip(columns, sizes):
        try:
            fields[column.name] = value_of(column.encoding, data[at : at + size])
        except ValueError as error:
            problem = f"{column.name!r} is no {column.encoding}: {error}"
            raise SampleError(place, problem, REWRITE) from None
        at += size
    return fields
