"""WebDataset tar shards, read by record number: members that share a name up to the first dot are one record.

The index holds offsets only; media stay in the tar and are read as a slice of the file when they are needed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.image_file import IMAGE_SUFFIXES
from dilatant.data.json_value import json_value
from dilatant.data.records import MEDIA_COLUMNS, Blocks, Record
from dilatant.data.sample import FileSlice, MediaKind
from dilatant.data.source_files import Scan, SourceFiles

VIDEO_SUFFIXES = frozenset({"mp4", "m4v", "mov", "mkv", "webm", "avi"})
AUDIO_SUFFIXES = frozenset({"wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff"})
TEXT_SUFFIXES = frozenset({"txt", "text", "caption"})


class TarRecords:
    """Records of several tar shards, in shard order. Picklable."""

    blocks: Blocks | None = None

    def __init__(self, files: SourceFiles) -> None:
        self._files = files

    def __len__(self) -> int:
        return int(self._files.first[-1])

    def name_of(self, index: int) -> str:
        file, number = self._files.locate(index)
        key_ends = self._files.part("key_ends", file)
        raw = self._files.part("keys", file)[key_ends[number] : key_ends[number + 1]].tobytes()
        return f"{self._files.names[file]}:{raw.decode('utf-8', 'replace')}"

    def read(self, index: int) -> Record:
        file, number = self._files.locate(index)
        first, end = self._files.part("first_members", file)[number : number + 2].tolist()
        members = self._files.part("members", file)[first:end].tolist()
        suffixes = self._files.part("suffixes", file).tobytes().decode("utf-8", "surrogateescape").split("\0")
        path, place = self._files.paths[file], self.name_of(index)
        fields: dict[str, Any] = {}
        media: dict[MediaKind, list[FileSlice]] = {"image": [], "audio": [], "video": []}
        found = []
        with open(path, "rb") as stream:
            for offset, length, kind_number in members:
                suffix = suffixes[kind_number]
                found.append(suffix)
                last = suffix.rpartition(".")[2]
                if last in IMAGE_SUFFIXES:
                    media["image"].append(FileSlice(path, offset, length))
                elif last in AUDIO_SUFFIXES:
                    media["audio"].append(FileSlice(path, offset, length))
                elif last in VIDEO_SUFFIXES:
                    media["video"].append(FileSlice(path, offset, length))
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


def scan_tar(path: Path, name: str) -> Scan:
    """Where the members of a shard lie.

    members: int64 [members, 3], first byte, length, number of the suffix. first_members: int64 [records + 1]. keys: the
    names of all records as bytes, parted at key_ends: int64 [records + 1]. suffixes: as bytes, parted by zeros. Raises
    UserError for a file that is no plain tar, or is cut off, naming it.
    """
    members: list[tuple[int, int, int]] = []
    numbers: dict[str, int] = {}
    keys: list[str] = []
    first_members: list[int] = []
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
                if not keys or key != keys[-1]:
                    keys.append(key)
                    first_members.append(len(members))
                number = numbers.setdefault(suffix, len(numbers))
                members.append((member.offset_data, member.size, number))
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{name} cannot be read as a tar: {error}") from None
    if members and members[-1][0] + members[-1][1] > path.stat().st_size:
        raise UserError(f"{name} is cut off: member {keys[-1]!r} ends after the file does")
    _refuse_early_end(path, name, end, keys[-1] if keys else "")
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
    arrays: dict[str, NDArray[Any]] = {
        "members": np.array(members, np.int64).reshape(-1, 3),
        "first_members": np.array([*first_members, len(members)], np.int64),
        "keys": np.frombuffer(b"".join(encoded), np.uint8),
        "key_ends": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "suffixes": np.frombuffer("\0".join(numbers).encode("utf-8", "surrogateescape"), np.uint8),
    }
    return Scan(len(keys), arrays)


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
