"""WebDataset tar shards, read by record number: members that share a name up to the first dot are one record.

The index holds offsets only; media stay in the tar and are read as a slice of the file when they are needed.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.json_value import json_value
from dilatant.data.records import MEDIA_COLUMNS, Blocks, Record
from dilatant.data.sample import FileSlice, MediaKind

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"})
AUDIO_SUFFIXES = frozenset({"wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff"})
TEXT_SUFFIXES = frozenset({"txt", "text", "caption"})


class TarRecords:
    """Records of several tar shards, in shard order. Picklable.

    Raises UserError for a file that is no plain tar, or is cut off, naming it.
    """

    blocks: Blocks | None = None

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._names = tuple(names)
        self._suffixes: list[str] = []
        self._shards = [_index(path, name, self._suffixes) for path, name in zip(paths, names)]
        self._first = np.cumsum([0, *(len(shard.first_member) - 1 for shard in self._shards)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, index: int) -> Record:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        shard, path = self._shards[number], self._paths[number]
        record = index - int(self._first[number])
        place = f"{self._names[number]}:{shard.key(record)}"
        fields: dict[str, Any] = {}
        media: dict[MediaKind, list[FileSlice]] = {"image": [], "audio": []}
        found = []
        with open(path, "rb") as stream:
            for member in range(shard.first_member[record], shard.first_member[record + 1]):
                suffix = self._suffixes[shard.suffix[member]]
                found.append(suffix)
                offset, length = int(shard.offset[member]), int(shard.length[member])
                last = suffix.rpartition(".")[2]
                if last in IMAGE_SUFFIXES:
                    media["image"].append(FileSlice(path, offset, length))
                elif last in AUDIO_SUFFIXES:
                    media["audio"].append(FileSlice(path, offset, length))
                elif last in TEXT_SUFFIXES or last in ("json", "cls"):
                    stream.seek(offset)
                    fields.update(_text_fields(place, last, stream.read(length)))
        for kind, slices in media.items():
            if slices:
                # The first column looked at, so that a path in the JSON, which repeats the name, is not.
                fields[MEDIA_COLUMNS[kind][0]] = slices
        if not fields:
            raise SampleError(
                place,
                f"holds only members of the kinds {', '.join(found)}",
                "add an image or a sound with .json, .txt or .cls",
            )
        return Record(place, path.parent, fields)


def _text_fields(place: str, suffix: str, raw: bytes) -> dict[str, Any]:
    if suffix != "json":
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise SampleError(
                place, f"the .{suffix} member is no text: {error}", "write the shard again"
            ) from None
        return {"label" if suffix == "cls" else "text": text}
    fields = json_value(raw, place, "the .json member")
    if isinstance(fields, list):
        return {"conversations": fields}
    if not isinstance(fields, dict):
        raise SampleError(place, f"the .json member is no object: {type(fields).__name__}", "write an object")
    return fields


class _Shard:
    """Where the members of one tar lie. Arrays are [members]; `first_member` is [records + 1]."""

    def __init__(self, members: list[tuple[str, int, int, int]]) -> None:
        keys: list[str] = []
        starts: list[int] = []
        for position, (key, _, _, _) in enumerate(members):
            if not keys or key != keys[-1]:
                keys.append(key)
                starts.append(position)
        self.first_member = np.array([*starts, len(members)], np.int64)
        self.offset = np.array([offset for _, offset, _, _ in members], np.int64)
        self.length = np.array([length for _, _, length, _ in members], np.int64)
        self.suffix = np.array([suffix for _, _, _, suffix in members], np.int32)
        encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
        self._keys = b"".join(encoded)
        self._key_end = np.cumsum([0, *map(len, encoded)])

    def key(self, record: int) -> str:
        raw = self._keys[self._key_end[record] : self._key_end[record + 1]]
        return raw.decode("utf-8", "replace")


def _index(path: Path, name: str, suffixes: list[str]) -> _Shard:
    numbers = {suffix: number for number, suffix in enumerate(suffixes)}
    members = []
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would keep every header
                if not member.isreg():
                    continue
                if member.issparse():
                    raise UserError(
                        f"{name} is a sparse tar, which cannot be read in place; write it without --sparse"
                    )
                key, suffix = _split_name(member.name)
                if key is None:
                    continue
                if suffix not in numbers:
                    numbers[suffix] = len(suffixes)
                    suffixes.append(suffix)
                members.append((key, member.offset_data, member.size, numbers[suffix]))
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{name} cannot be read as a tar: {error}") from None
    size = path.stat().st_size
    if members and members[-1][1] + members[-1][2] > size:
        raise UserError(f"{name} is cut off: member {members[-1][0]!r} ends after the file does")
    _refuse_early_end(path, name, end, members[-1][0] if members else "")
    return _Shard(members)


def _refuse_early_end(path: Path, name: str, end: int, last: str) -> None:
    """A tar ends in blocks of zeros. At anything else tarfile stops without a word, as if that were the end."""
    with open(path, "rb") as stream:
        stream.seek(end)
        block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise UserError(
                f"{name} is cut off after member {last!r}: it has no end mark; write or fetch it again"
            )
        while block:
            if block.strip(b"\0"):
                raise UserError(
                    f"{name} is damaged after member {last!r}, or several tars were joined; write or fetch it again"
                )
            block = stream.read(1 << 20)


def _split_name(name: str) -> tuple[str | None, str]:
    """Key and suffix by the WebDataset convention: the key ends at the first dot of the file name."""
    path = PurePosixPath(name)
    if path.name.startswith("."):
        return None, ""
    stem, _, suffix = path.name.partition(".")
    parent = str(path.parent)
    return (stem if parent == "." else f"{parent}/{stem}"), suffix.lower()
