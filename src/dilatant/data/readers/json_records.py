"""JSON Lines files and JSON arrays: read by record number without loading the file."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.files.remote_files import map_file
from dilatant.data.errors import SampleError
from dilatant.data.readers.record_fields import CHAT_COLUMNS, is_objects, json_value
from dilatant.data.readers.source_files import MOST_BYTES, Scan, SpannedRecords

SCAN_BYTES = 1 << 24
MARK = b"\xef\xbb\xbf"
"""The byte-order mark that some programs write before UTF-8."""
SPACE = (9, 10, 13, 32)
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonRecords(SpannedRecords):
    """Records of several JSON or JSON Lines files."""

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        fields = json_value(self.raw(place, file, number), place)
        if not isinstance(fields, dict):
            raise SampleError(place, f"is JSON but no object: {type(fields).__name__}", "write one object a record")
        lists = [key for key, value in fields.items() if is_objects(value) and value]
        if (
            len(self._files.part("spans", file)) == 1
            and len(fields) == len(lists) == 1
            and lists[0] not in (*CHAT_COLUMNS, "texts")
        ):
            raise SampleError(
                place,
                f"is one object that holds a list of {len(fields[lists[0]])} records under {lists[0]!r}",
                "write that list alone, or one record a line",
            )
        return fields


def scan_json(path: Path, name: str) -> Scan:
    """Return `spans`: first and end byte of every record, int64 [records, 2]. Raises UserError naming a file that is
    neither form."""
    spans = _record_spans(path, name)
    return Scan(len(spans), {"spans": spans})


def _record_spans(path: Path, name: str) -> NDArray[np.int64]:
    text = map_file(path)
    begin = len(MARK) if text[: len(MARK)] == MARK else 0
    first = text[begin : begin + (1 << 16)].lstrip()[:1]
    if first == b"[":
        return _array_spans(text, begin, name)
    if first == b"{":
        lines = _line_spans(text, begin)
        objects = None if _is_json(text, lines[0]) else _object_spans(text, begin, name)
        return lines if objects is None else objects
    raise UserError(f"{name} is neither JSON Lines nor a JSON array: it starts with {first!r}")


def _line_spans(text: mmap.mmap, begin: int) -> NDArray[np.int64]:
    """Return the spans of the lines that hold more than whitespace."""
    codes = np.frombuffer(text, np.uint8)
    breaks = [
        np.flatnonzero(codes[offset : offset + SCAN_BYTES] == 10) + offset
        for offset in range(0, len(codes), SCAN_BYTES)
    ]
    end = np.concatenate([*breaks, [len(codes)]])
    start = np.concatenate([[begin], end[:-1] + 1])
    filled = end > start
    # Few lines start with a blank; only those are read in full.
    blank = np.flatnonzero(filled & np.isin(codes[np.minimum(start, len(codes) - 1)], SPACE))
    filled[blank] = [bool(text[start[line] : end[line]].strip()) for line in blank]
    return np.stack([start, end], axis=1)[filled]


def _is_json(text: mmap.mmap, span: NDArray[np.int64]) -> bool:
    """Return True if a line is valid JSON by itself. A line above `MOST_BYTES` is not parsed but treated as valid."""
    if span[1] - span[0] > MOST_BYTES:
        return True  # reading the record reports its size
    try:
        json.loads(text[span[0] : span[1]])
    except (ValueError, RecursionError):
        return False
    return True


def _object_spans(text: mmap.mmap, begin: int, name: str) -> NDArray[np.int64] | None:
    """Return the spans of consecutive objects that each extend over several lines (indented JSON). None if the text is
    something else, such as JSON Lines with a damaged first line, or larger than `MOST_BYTES`. Raises UserError for an
    invalid object after the first, or a first one whose `{` ends its line."""
    if len(text) > MOST_BYTES:
        return None
    characters = text[begin:].decode("latin-1")  # one character for each byte
    decoder = json.JSONDecoder(parse_int=str, strict=False)
    spans: list[tuple[int, int]] = []
    at = _behind_space(characters, 0)
    while at < len(characters):
        try:
            value, end = decoder.raw_decode(characters, at)
        except (ValueError, RecursionError) as error:
            if spans or characters[at : at + 2] in ("{\n", "{\r"):
                raise UserError(
                    f"{name} has objects over several lines and is wrong or cut off in record {len(spans) + 1}: {error}"
                ) from None
            return None
        if not isinstance(value, dict):
            return None
        spans.append((at + begin, end + begin))
        at = _behind_space(characters, end)
    return np.array(spans, np.int64).reshape(-1, 2)


def _array_spans(text: mmap.mmap, begin: int, name: str) -> NDArray[np.int64]:
    """Return the spans of the elements of a top-level array."""
    import msgspec

    try:
        elements = msgspec.json.decode(memoryview(text)[begin:], type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        # msgspec is stricter than Python's json module, which accepts NaN and lone surrogates, and it names no record.
        return _array_spans_one_by_one(text, begin, name)
    start = np.fromiter((_address(element) - _address(text) for element in elements), np.int64, len(elements))
    return np.stack([start, start + np.fromiter(map(len, elements), np.int64, len(elements))], axis=1)


def _address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # the pattern also matches no space
    return found.end()


def _array_spans_one_by_one(text: mmap.mmap, begin: int, name: str) -> NDArray[np.int64]:
    """Find the spans with the standard library: slower, in memory. Raises UserError naming the invalid record."""
    characters = text[begin:].decode("latin-1")  # one character for each byte, so that positions are file offsets
    # Errors inside a record are reported when that record is read.
    decoder = json.JSONDecoder(parse_int=str, strict=False)
    spans: list[tuple[int, int]] = []
    end = characters.index("[")
    closed = re.compile(r"\s*\[\s*\]").match(characters) is not None
    while not closed:
        start = _behind_space(characters, end + 1)
        problem = "is cut off"
        try:
            _, end = decoder.raw_decode(characters, start)
            spans.append((start + begin, end + begin))
            end = _behind_space(characters, end)
            closed = characters[end : end + 1] == "]"
            sound = characters[end : end + 1] in ("]", ",")
        except RecursionError:
            sound, problem = False, f"nests too deep in record {len(spans) + 1}"
        except ValueError as error:
            sound, problem = False, f"is wrong, or cut off, in record {len(spans) + 1}: {error}"
        if not sound:
            raise UserError(f"{name}: the JSON array {problem}; correct it, or write one record a line")
    rest = characters[end + 1 if spans else characters.index("]") + 1 :].strip()
    if rest:
        raise UserError(f"{name} goes on after its JSON array: {rest[:20]!r}; write one array, or JSON Lines")
    return np.array(spans, np.int64).reshape(-1, 2)
