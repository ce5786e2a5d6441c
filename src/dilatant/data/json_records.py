"""JSON Lines files and files that hold one JSON array, read by record number without loading the file.

Only the place of each record is kept in memory: 16 bytes a record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.errors import SampleError
from dilatant.data.records import Blocks, Record

SCAN_BYTES = 1 << 24
WHITESPACE = b" \t\r\n"


class JsonRecords:
    """Records of several JSON or JSON Lines files, in file order. Picklable.

    names: how messages call each file. Raises UserError for a file that is neither form, naming it.
    """

    blocks: Blocks | None = None

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self._names = tuple(names)
        self._spans = [_record_spans(path, name) for path, name in zip(paths, names)]
        self._first = np.cumsum([0, *(len(spans) for spans in self._spans)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def read(self, index: int) -> Record:
        file = int(np.searchsorted(self._first, index, side="right")) - 1
        number = index - int(self._first[file])
        start, end = self._spans[file][number]
        place = f"{self._names[file]}:{number + 1}"
        with open(self._paths[file], "rb") as stream:
            stream.seek(int(start))
            raw = stream.read(int(end - start))
        try:
            fields = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise SampleError(place, f"is not valid JSON: {error}", "correct or remove the record") from None
        if not isinstance(fields, dict):
            raise SampleError(
                place, f"is JSON but no object: {type(fields).__name__}", "write one object a record"
            )
        return Record(place, self._paths[file].parent, fields)


def _record_spans(path: Path, name: str) -> NDArray[np.int64]:
    """Start and end byte of every record: int64 [records, 2]."""
    with open(path, "rb") as stream:
        first = _first_byte(stream.read(1 << 16))
    if first == b"[":
        return _array_spans(path, name)
    if first == b"{":
        return _line_spans(path)
    if first == b"":
        return np.zeros((0, 2), np.int64)
    raise UserError(f"{name} is neither JSON Lines nor a JSON array: it starts with {first!r}")


def _first_byte(head: bytes) -> bytes:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip(WHITESPACE)[:1]


def _chunks(path: Path) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    offset = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(SCAN_BYTES):
            yield offset, np.frombuffer(chunk, np.uint8)
            offset += len(chunk)


def _line_spans(path: Path) -> NDArray[np.int64]:
    """Lines that hold more than whitespace. A byte order mark is left out of the first."""
    ends, filled = [], []
    last_filled = -1  # position of the newest byte that is not whitespace
    for offset, chunk in _chunks(path):
        newlines = np.flatnonzero(chunk == 10)
        text = np.flatnonzero(~np.isin(chunk, np.frombuffer(WHITESPACE, np.uint8))) + offset
        before = np.searchsorted(text, newlines + offset)
        filled.append(np.concatenate([[last_filled], text])[before])
        ends.append(newlines + offset)
        last_filled = int(text[-1]) if len(text) else last_filled
    size = path.stat().st_size
    end = np.concatenate([*ends, [size]]).astype(np.int64)
    newest = np.concatenate([*filled, [last_filled]])
    start = np.concatenate([[0], end[:-1] + 1])
    with open(path, "rb") as stream:
        start[0] = 3 if stream.read(3) == b"\xef\xbb\xbf" else 0
    return np.stack([start, end], axis=1)[newest >= start]


def _array_spans(path: Path, name: str) -> NDArray[np.int64]:
    """Elements of a top-level array of objects, found by bracket depth outside strings."""
    starts, ends = [], []
    depth, inside, escaped = 0, False, False  # carried from chunk to chunk
    for offset, chunk in _chunks(path):
        quotes = np.flatnonzero(chunk == ord('"'))
        backslashes = chunk == ord("\\")
        real = quotes[~_is_escaped(backslashes, quotes, escaped)]
        trailing = _trailing_run(backslashes)
        escaped = bool((trailing + (escaped and trailing == len(chunk))) % 2)
        opening = np.isin(chunk, np.frombuffer(b"{[", np.uint8))
        closing = np.isin(chunk, np.frombuffer(b"}]", np.uint8))
        brackets = np.flatnonzero(opening | closing)
        in_string = (np.searchsorted(real, brackets) + inside) % 2 == 1
        brackets = brackets[~in_string]
        steps = np.where(opening[brackets], 1, -1)
        depths = depth + np.cumsum(steps)
        starts.append(brackets[(steps == 1) & (depths == 2)] + offset)
        ends.append(brackets[(steps == -1) & (depths == 1)] + offset + 1)
        depth = int(depths[-1]) if len(depths) else depth
        inside = bool((len(real) + inside) % 2)
    start, end = np.concatenate(starts), np.concatenate(ends)
    if depth or inside or len(start) != len(end):
        raise UserError(f"{name} is a JSON array that ends too early; the file is probably cut off")
    return np.stack([start, end], axis=1).astype(np.int64)


def _is_escaped(
    backslashes: NDArray[np.bool_], quotes: NDArray[np.int64], carried: bool
) -> NDArray[np.bool_]:
    """Which quotes follow an odd run of backslashes; `carried`: the chunk before ended with one."""
    positions = np.arange(len(backslashes))
    last_other = np.maximum.accumulate(np.where(backslashes, -1, positions))
    before = np.where(quotes > 0, last_other[np.maximum(quotes - 1, 0)], -1)
    run = quotes - 1 - before
    run = run + np.where((before == -1) & carried, 1, 0)
    return run % 2 == 1


def _trailing_run(flags: NDArray[np.bool_]) -> int:
    others = np.flatnonzero(~flags)
    return len(flags) - 1 - int(others[-1]) if len(others) else len(flags)
