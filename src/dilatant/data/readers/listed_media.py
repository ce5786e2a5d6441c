"""Media columns of a record: which columns list media, and each item parsed into a `Media`."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dilatant.config.files.remote_files import RemotePath, is_address
from dilatant.data.errors import SampleError
from dilatant.data.media.media_kind import STILL_SUFFIXES, kind_of_bytes, kind_of_name
from dilatant.data.readers.record_fields import (
    MEDIA_COLUMNS,
    OTHER_MEDIA_COLUMNS,
    Fields,
    FileRecord,
    as_list,
    is_blank,
    is_list,
    kind_of,
    literal_in,
    rows,
)
from dilatant.data.sample import FileSlice, Frames, Media, MediaKind, Turn

FILE_COLUMNS = ("file_name", "file_names", "filename", "file_path", "filepath", "file", "path")
"""Columns of file names whose suffix determines the media kind."""
ITEM_OPTIONS = frozenset(
    (
        *("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"),
        *("fps", "nframes", "num_frames", "min_frames", "max_frames", "sample_fps", "raw_fps"),
        *("video_start", "video_end", "start", "end", "start_time", "end_time"),
    )
)
"""Keys by which other tools set how a single item is sampled or resized."""
FRAME_RATES = ("sample_fps", "fps", "raw_fps")
"""The options that give the frame rate of a list of frames; the first one present is used."""
_SOURCES = ("bytes", "path", "url", "data", "file_name")
_DESCRIPTIONS = frozenset({"type", "format", "media_type"})
"""Keys of an item that say what its content says, too."""
_NUMBERED_MARKER = re.compile(r"<\|?image[ _]?(\d+)\|?>")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]{64,}={0,2}\s*")


class ListedMedia:
    """Items of a record's media columns. Typed content without a source takes the next item, iteration the rest."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._waiting: dict[MediaKind, list[Media]] = {kind: [] for kind in MEDIA_COLUMNS}
        self._taken: set[MediaKind] = set()
        self._numbered: dict[int, Media] = {}
        for kind, names in MEDIA_COLUMNS.items():
            numbered = [] if fields.is_named(f"{kind}s") else _numbered(fields, kind)
            name = fields.only((*names, *numbered[:1]), f"{kind}s")
            if name in numbered:
                found = {int(column.rpartition("_")[2]): fields.take(column) for column in numbered}
                media = {number: parse_media(fields, kind, value, number) for number, value in found.items()}
                self._waiting[kind] = list(media.values())
                if kind == "image":
                    self._numbered = media
                continue
            if name is None:
                name = fields.only(_others(fields, kind), f"{kind}s")
            if name is None and not fields.is_named(f"{kind}s"):
                name = next(
                    (file for file in FILE_COLUMNS if fields.has(file) and _is_of(fields.peek(file), kind)), None
                )
            if name is not None:
                self._waiting[kind] = [
                    parse_media(fields, kind, item, position)
                    for position, item in enumerate(_items(kind, name, fields.take(name)), 1)
                ]

        offset = fields.peek("offset")  # seconds, in NeMo's manifests
        if fields.has("audio_filepath") and isinstance(offset, int | float) and offset > 0:
            fields.refuse(
                f"its sound begins {offset:g} s into a file ('offset'), and whole files are read",
                "write each part of a sound to a file of its own",
            )

    def take(self, kind: MediaKind) -> Media:
        if not self._waiting[kind]:
            self._fields.refuse(
                f"the messages name more {kind}s than the record holds",
                f"give each {kind} part its source, or list every {kind} in the record",
            )
        self._taken.add(kind)
        return self._waiting[kind].pop(0)

    def placed(self, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
        """Replace `<image 1>` in the user's turns by the image of the column `image_1`. Without such columns, the
        number is a position in a list of images, if all numbers have one and no text has the plain marker. Raises
        SampleError for items without a place beside items with one."""
        texts = [part for turn in turns for part in turn.content if isinstance(part, str)]
        for kind in self._taken:
            if self._waiting[kind] and not any(f"<{kind}>" in text for text in texts):
                problem = f"the messages name fewer {kind}s than the record holds"
                self._fields.refuse(problem, f"add a part for each {kind}, or remove the others")
        numbered = self._numbered or dict(enumerate(self._waiting["image"], 1))
        named = {int(number) for text in texts for number in _NUMBERED_MARKER.findall(text)}
        is_plain = any("<image>" in text for text in texts)
        if not numbered or (not self._numbered and (is_plain or not named <= numbered.keys())):
            return turns
        return tuple(
            replace(turn, content=tuple(self._placed(turn.content, numbered))) if turn.role == "user" else turn
            for turn in turns
        )

    def _placed(self, content: tuple[str | Media, ...], numbered: Mapping[int, Media]) -> Iterator[str | Media]:
        for part in content:
            pieces = [part] if isinstance(part, Media) else _NUMBERED_MARKER.split(part)
            for at, piece in enumerate(pieces):
                if at % 2 == 0:
                    if piece != "" or len(pieces) == 1:
                        yield piece
                    continue
                media = numbered.get(int(str(piece)))
                if media is None:
                    problem = f"the text names image {piece}, but 'image_{piece}' is empty"
                    self._fields.refuse(problem, "correct the record")
                if media in self._waiting["image"]:
                    self._waiting["image"].remove(media)
                yield media

    def __bool__(self) -> bool:
        return any(self._waiting.values()) or bool(self._numbered)

    def __iter__(self) -> Iterator[Media]:
        for waiting in self._waiting.values():
            yield from waiting


def _numbered(fields: Fields, kind: MediaKind) -> list[str]:
    """Return columns such as `image_1`, in the order of their numbers."""
    names = [name for name in fields.names() if name.startswith(f"{kind}_") and name[len(kind) + 1 :].isdecimal()]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def _others(fields: Fields, kind: MediaKind) -> list[str]:
    """Return the columns with other known names whose values may be media."""
    fits = (str, bytes, list, dict)
    return [name for name in OTHER_MEDIA_COLUMNS[kind] if fields.has(name) and isinstance(fields.peek(name), fits)]


def _is_of(value: Any, kind: MediaKind) -> bool:
    return all(isinstance(item, str) and kind_of_name(item) == kind for item in as_list(value))


def _items(kind: MediaKind, name: str, value: Any) -> Sequence[Any]:
    """Return the items that a column lists, without empty entries; a list of still pictures in `video` is one clip."""
    items = [item for item in as_list(rows(literal_in(value))) if not (is_blank(item) or _is_hollow(item))]
    if kind == "video" and name == "video" and len(items) > 1 and all(map(_is_still, items)):
        return (items,)
    return items


def _is_hollow(item: Any) -> bool:
    """Return True for a struct whose values are all null, which columnar files write for a missing item."""
    return isinstance(item, Mapping) and all(is_blank(value) for value in item.values())


def _is_still(item: Any) -> bool:
    """Return True for a still picture, which in a list of pictures is a frame of a clip."""
    if isinstance(item, Mapping):
        item = next((item[key] for key in _SOURCES if not is_blank(item.get(key))), None)
    if isinstance(item, bytes):
        return kind_of_bytes(item[:16]) == "image" and not item.startswith(b"GIF")
    return isinstance(item, str) and item.rpartition(".")[2].lower() in STILL_SUFFIXES


def parse_media(
    fields: Fields, kind: MediaKind, value: Any, position: int, options: Mapping[str, Any] | None = None
) -> Media:
    """Parse one media item. It is a path, bytes, a `data:` address, base64, or an object that holds one of these; a
    clip may also be a list of its frames.

    options: the item's other settings. Raises SampleError for options that are not supported.
    """
    record, name = fields.record, f"{kind} {position}"
    options = dict(options or {})
    value = rows(value)
    if isinstance(value, Mapping):
        about, value = value, None
        key = next((key for key in _SOURCES if not is_blank(about.get(key))), None)
        if key is None and "array" in about:
            fields.refuse(
                f"{name} is decoded (an 'array'), and only encoded media are read",
                "write it to a file (WAV or FLAC for sounds), or keep its 'bytes' or 'path'",
            )
        if key is None:
            fields.refuse(f"{name} has neither 'bytes' nor 'path'", "give one of them")
        for other in about.keys() - set(_SOURCES) - ITEM_OPTIONS - _DESCRIPTIONS:
            if not is_blank(about[other]):
                fields.mark_unused(f"{kind}s[].{other}")
        options |= {option: about[option] for option in ITEM_OPTIONS & about.keys()}
        value = about[key]
        if isinstance(about.get("path"), str) and about["path"]:
            name = about["path"]
        if key == "data" and isinstance(value, str) and not value.startswith("data:"):
            value = _base64(record, name, value)
    options = {option: said for option, said in options.items() if not is_blank(said)}
    if kind == "video" and is_list(value):
        return _clip_of_frames(fields, value, name, options)
    if options:
        fields.refuse(
            f"{name} has the option {min(options)!r}, which holds for single items nowhere",
            "remove it; 'model.processor' says how all items are seen, and a part of a clip is a file of its own",
        )
    source = _source(record, name, value)
    return Media(kind, source, value if isinstance(source, Path) else name)


def _source(record: FileRecord, name: str, value: Any) -> Any:
    if isinstance(value, FileSlice):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise SampleError(record.id, f"{name} is {kind_of(value)}", "give a path, encoded bytes or a data: address")
    if value.startswith("data:"):
        return _base64(record, name, value.partition(",")[2])
    if is_address(value):
        place = RemotePath(value)
        if not isinstance(record.folder, RemotePath) or place.place != record.folder.place:
            raise SampleError(
                record.id,
                f"{value!r} is a remote address, and not of the data's own bucket or server",
                "set 'media_dir' to the folder that has the media, or download them",
            )
        return place
    if _BASE64.fullmatch(value) and kind_of_bytes(_base64(record, name, "".join(value[:128].split())[:48])) is not None:
        return _base64(record, name, value)
    path = Path(unquote(value.removeprefix("file://")) if value.startswith("file://") else value)
    return path if path.is_absolute() else record.folder / path


def _clip_of_frames(fields: Fields, value: Sequence[Any], name: str, options: Mapping[str, Any]) -> Media:
    """Parse a clip given as a list of frames. options: `FRAME_RATES` give frames per second; others are refused."""
    pictures = tuple(
        parse_media(fields, "image", item, number) for number, item in enumerate(value, 1) if not is_blank(item)
    )
    if not pictures:
        fields.refuse(f"{name} is a list without frames", "give their paths")
    rate = next((options[key] for key in FRAME_RATES if key in options), None)
    other = min(set(options) - set(FRAME_RATES), default=None)
    if other is not None:
        fields.refuse(f"{name} has the option {other!r}, which a list of frames cannot obey", "remove it")
    try:
        fps = None if rate is None else float(rate)
        is_right = fps is None or 0 < fps < 1e6
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        fields.refuse(f"{name} has {rate!r} frames a second", "give a number above 0")
    return Media("video", Frames(pictures, fps), name)


def _base64(record: FileRecord, name: str, text: str) -> bytes:
    """Decode base64, also with line breaks, in the URL-safe alphabet, and without padding."""
    plain = "".join(text.split()).translate(str.maketrans("-_", "+/")).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise SampleError(record.id, f"{name} is not valid base64", "encode it again") from None
