"""WebDataset tar shards, read by record number: members that share a name up to the first dot are one record.

The index holds offsets only; media stay in the tar and are read as slices of the file.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.files.remote_files import open_data
from dilatant.data.errors import SampleError
from dilatant.data.media.media_kind import HEAD_BYTES, kind_of_bytes, kind_of_suffix
from dilatant.data.readers.record_fields import MEDIA_COLUMNS, FileRecord, as_list, json_value
from dilatant.data.readers.source_files import RecordsOfFiles, Scan
from dilatant.data.sample import FileSlice, MediaKind

TEXT_SUFFIXES = frozenset({"txt", "text", "caption"})
JSON_SUFFIXES = frozenset({"json", "jsn"})
FIELD_SUFFIXES = TEXT_SUFFIXES | {"json", "cls"}
MOST_TEXT_BYTES = 256 << 20
"""Bytes of a member that is read as JSON or text; JSON may hold media as base64."""
ABOUT = frozenset({"readme", "license", "licence", "notice", "copying", "changelog", "citation", "authors"})
"""Names of files that describe a shard and are no samples."""
MOST_LINKS = 8
"""Links followed from a member to the member that holds its bytes."""
_NOWHERE = -1
"""Offset of a member that is no file of the shard."""


class TarRecords(RecordsOfFiles):
    """Records of several tar shards."""

    def name_of(self, index: int) -> str:
        return f"{self._files.names[self._files.locate(index)[0]]}:{self.key_of(index)}"

    def key_of(self, index: int) -> str:
        """Return the name that the members of a record share."""
        file, number = self._files.locate(index)
        key_ends = self._files.part("key_ends", file)
        raw = self._files.part("keys", file)[key_ends[number] : key_ends[number + 1]].tobytes()
        return raw.decode("utf-8", "replace")

    def read(self, index: int) -> FileRecord:
        return record_of_members(*self.members(index))

    def members(self, index: int) -> tuple[str, Path, list[tuple[str, FileSlice]]]:
        """Return the name of a record, the folder of its shard, and its members by suffix. Raises SampleError."""
        file, number = self._files.locate(index)
        first, end = self._files.part("first_members", file)[number : number + 2].tolist()
        members = self._files.part("members", file)[first:end].tolist()
        suffixes = self._files.part("suffixes", file).tobytes().decode("utf-8", "surrogateescape").split("\0")
        path, place = self._files.paths[file], f"{self._files.names[file]}:{self.key_of(index)}"
        found = []
        for offset, length, kind_number in members:
            suffix = suffixes[kind_number]
            if offset == _NOWHERE:
                raise SampleError(
                    place,
                    f"its member .{suffix} is no file of the shard, but a device or a link that leads out of it",
                    "write the file itself (tar --dereference --hard-dereference)",
                )
            found.append((suffix, FileSlice(path, offset, length)))
        return place, path.parent, found

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Names of members that describe a shard and are no samples."""
        names = self._files.array("passed_over").tobytes().decode("utf-8", "replace")
        return tuple(dict.fromkeys(filter(None, names.split("\0"))))


def record_of_members(place: str, folder: Path, members: Sequence[tuple[str, FileSlice]]) -> FileRecord:
    """Return the record of the files that form a sample, each with its suffix: texts become columns. Raises SampleError
    for texts that contradict each other, are damaged or too large."""
    fields: dict[str, Any] = {}
    media: dict[MediaKind, list[tuple[str, FileSlice]]] = {"image": [], "audio": [], "video": []}
    unused = []
    _refuse_doubtful(place, [suffix for suffix, _ in members])
    for suffix, member in members:
        last = suffix.rpartition(".")[2]
        if last in FIELD_SUFFIXES:
            found = _text_fields(place, last, member_text(place, suffix, member))
            both = next((key for key in found if fields.get(key, found[key]) != found[key]), None)
            if both is not None:
                raise SampleError(place, f"two of its members say different things of {both!r}", "keep one of them")
            fields |= found
            continue
        kind = kind_of_suffix(last) or kind_of_bytes(read_member(member, min(member.length, HEAD_BYTES)))
        if kind is None:
            unused.append(f".{suffix}")
        else:
            media[kind].append((suffix, member))
    for kind, found_media in media.items():
        if found_media:
            listed: Any = next((fields[name] for name in MEDIA_COLUMNS[kind] if fields.get(name)), [])
            # The column of first choice, so that a path in the JSON, which repeats the name, is ignored.
            fields[MEDIA_COLUMNS[kind][0]] = _as_listed(place, kind, found_media, as_list(listed))
    if not fields:
        raise SampleError(
            place,
            f"holds only members of the kinds {', '.join(unused)}",
            "add an image or a sound with .json, .txt or .cls",
        )
    return FileRecord(place, folder, fields, tuple(unused))


def _as_listed(
    place: str, kind: MediaKind, members: Sequence[tuple[str, FileSlice]], listed: Sequence[Any]
) -> list[FileSlice]:
    """Return the media members of a sample: in the order in which its JSON lists their names, if it lists all of them,
    else in that of the shard. Raises SampleError if it lists more than there are."""
    if len(listed) > len(members):
        raise SampleError(
            place, f"its JSON lists {len(listed)} {kind}s, of which the shard holds {len(members)}", "add the others"
        )
    own = dict(members)
    ends = [posixpath.basename(name).lower() if isinstance(name, str) else "" for name in listed]
    named = [max((s for s in own if f".{end}".endswith(f".{s}")), key=len, default="") for end in ends]
    return [own[suffix] for suffix in (named if sorted(named) == sorted(own) else own)]


def read_member(member: FileSlice, length: int) -> bytes:
    """Return the first `length` bytes of a member. Raises OSError."""
    with open_data(member.path, member.offset + member.length) as stream:
        stream.seek(member.offset)
        return stream.read(length)


def member_text(place: str, suffix: str, member: FileSlice) -> Any:
    """Return the JSON in a member, or its text without space around it. Raises SampleError."""
    if member.length > MOST_TEXT_BYTES:
        raise SampleError(
            place,
            f"its member .{suffix} has {member.length:,} bytes, more than the {MOST_TEXT_BYTES:,} allowed",
            "cut it into pieces",
        )
    raw = read_member(member, member.length)
    if suffix.rpartition(".")[2] in JSON_SUFFIXES:
        return json_value(raw, place, f"the .{suffix} member")
    try:
        return raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise SampleError(place, f"the .{suffix} member is no text: {error}", "write the shard again") from None


def _refuse_doubtful(place: str, suffixes: list[str]) -> None:
    """Raise SampleError if the members of a key cannot be one sample: two texts, or one name twice."""
    split = [suffix.rpartition(".")[::2] for suffix in suffixes]
    inner = {middle for middle, last in split if middle and last not in FIELD_SUFFIXES}
    texts = [("txt" if last in TEXT_SUFFIXES else last, middle) for middle, last in split if last in FIELD_SUFFIXES]
    twice = next((suffix for suffix in suffixes if suffixes.count(suffix) > 1), None)
    if twice is not None:
        raise SampleError(
            place, f"has the member .{twice} more than once", "give every sample of a shard a key of its own"
        )
    if len({last for last, _ in texts}) < len(texts) or any(middle in inner and len(inner) > 1 for _, middle in texts):
        raise SampleError(
            place,
            f"joins members that seem to be several samples, {', '.join(f'.{suffix}' for suffix in suffixes)}: a "
            "sample's key ends at the first dot of its name",
            "rename the files so that no key holds a dot",
        )


def _text_fields(place: str, suffix: str, found: Any) -> dict[str, Any]:
    if suffix != "json":
        return {"label" if suffix == "cls" else "text": found}
    if isinstance(found, list):
        return {"conversations": found}
    if not isinstance(found, dict):
        raise SampleError(place, f"the .json member is no object: {type(found).__name__}", "write an object")
    return found


def scan_tar(path: Path, name: str) -> Scan:
    """Return the locations of the members of a shard.

    members: int64 [members, 3]: first byte, length, number of the suffix. first_members: int64 [records + 1]. keys: the
    names of all records as bytes, split at key_ends: int64 [records + 1]. suffixes: bytes, separated by zeros.
    passed_over: names of members that describe the shard, each followed by a zero. Links are resolved to their members.
    Raises UserError naming a file that is no plain tar, is cut off, or has non-adjacent members of a sample.
    """
    members: list[tuple[int, int, int]] = []
    numbers: dict[str, int] = {}
    keys: dict[str, None] = {}
    first_members: list[int] = []
    passed_over: list[str] = []
    places: dict[str, tuple[int, int]] = {}
    targets: dict[str, str] = {}
    links: dict[int, str] = {}
    key = last_key = ""
    try:
        with open_data(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # else it keeps every header
                if member.isdir():
                    continue
                if member.issparse():
                    raise UserError(f"{name} is a sparse tar, which cannot be read in place; write it without --sparse")
                full = posixpath.normpath(member.name)
                if member.isreg():
                    places[full] = member.offset_data, member.size
                else:
                    targets[full] = _target(member, full)
                key, suffix = _split_name(full)
                if _is_hidden(full):
                    continue
                if key.rpartition("/")[2].lower() in ABOUT:
                    passed_over.append(full)
                    continue
                if not keys or key != last_key:
                    if key in keys:
                        raise UserError(
                            f"{name}: the members of {key!r} are not adjacent, or two samples have that key; write the "
                            "shard with its members sorted by name (tar --sort=name)"
                        )
                    keys[key] = None
                    last_key = key
                    first_members.append(len(members))
                if not member.isreg():
                    links[len(members)] = full
                number = numbers.setdefault(suffix, len(numbers))
                members.append((member.offset_data, member.size, number))
            end = archive.offset
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{name} cannot be read as a tar: {error}") from None
    last_byte = max((offset + size for offset, size in places.values()), default=0)
    if last_byte > path.stat().st_size:
        raise UserError(f"{name} is cut off: member {last_key!r} ends after the file does")
    _refuse_early_end(path, name, end, last_key)
    for at, target in links.items():
        for _ in range(MOST_LINKS):
            target = targets.get(target, target)
        members[at] = (*places.get(target, (_NOWHERE, 0)), members[at][2])
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
    arrays: dict[str, NDArray[Any]] = {
        "members": np.array(members, np.int64).reshape(-1, 3),
        "first_members": np.array([*first_members, len(members)], np.int64),
        "keys": np.frombuffer(b"".join(encoded), np.uint8),
        "key_ends": np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        "passed_over": np.frombuffer(
            "".join(f"{about}\0" for about in passed_over).encode("utf-8", "surrogateescape"), np.uint8
        ),
        "suffixes": np.frombuffer("\0".join(numbers).encode("utf-8", "surrogateescape"), np.uint8),
    }
    return Scan(len(keys), arrays)


def _refuse_early_end(path: Path, name: str, end: int, last: str) -> None:
    """Raise UserError unless only zero blocks follow: tarfile silently stops at anything that is not a header."""
    with open_data(path) as stream:
        stream.seek(end)
        block = stream.read(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise UserError(f"{name} is cut off after member {last!r}: it has no end mark; write or fetch it again")
        while block:
            if block.strip(b"\0"):
                raise UserError(
                    f"{name} is damaged after member {last!r}, or several tars were joined; write or fetch it again"
                )
            block = stream.read(1 << 20)


def _is_hidden(name: str) -> bool:
    if not name.startswith((".", "__MACOSX")) and "/." not in name and "/__MACOSX" not in name:
        return False
    return any((part.startswith(".") and part != "..") or part == "__MACOSX" for part in name.split("/"))


def _split_name(name: str) -> tuple[str, str]:
    """Return key and suffix by the WebDataset convention: the key ends at the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


def _target(member: tarfile.TarInfo, name: str) -> str:
    """Return the name of the member that a link points to; "" for a member that is no link."""
    if member.islnk():
        return posixpath.normpath(member.linkname)
    if member.issym() and not member.linkname.startswith("/"):
        return posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
    return ""
