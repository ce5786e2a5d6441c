"""Fields of a record: look up columns by their common names, and track which of them were used."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from dilatant.data.errors import SampleError
from dilatant.data.sample import FileSlice, MediaKind

MEDIA_COLUMNS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("images", "image"),
    "audio": ("audios", "audio"),
    "video": ("videos", "video"),
}
OTHER_MEDIA_COLUMNS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": (
        *("image_path", "image_paths", "image_file", "image_files", "image_url", "image_urls", "image_bytes"),
        *("img", "imgs", "img_path", "img_paths", "picture", "pictures", "photo", "photos"),
        *("jpg", "jpeg", "png", "webp"),
    ),
    "audio": (
        *("audio_path", "audio_paths", "audio_file", "audio_files", "audio_filepath", "audio_url"),
        *("sound", "sounds", "wav", "mp3", "flac"),
    ),
    "video": (
        *("video_path", "video_paths", "video_file", "video_files", "video_url", "video_urls"),
        *("clip_path", "mp4"),
    ),
}
"""Alternative names, used if a record has none of `MEDIA_COLUMNS`."""
QUESTION_COLUMNS = ("question", "query", "instruction", "prompt", "problem")
ANSWER_COLUMNS = ("answer", "response", "completion", "output", "answerKey")
OTHER_ANSWER_COLUMNS = ("solution", "caption", "captions", "transcription", "transcript", "sentence", "text", "label")
"""Columns of the text to learn if a record has none of `ANSWER_COLUMNS`."""
CHAT_COLUMNS = ("messages", "conversations", "conversation")
TURN_COLUMNS = ("prompt", "completion", "chosen", "rejected", "rejected_response", "rejected_messages")
"""Columns that hold text or messages, which CSV files and some Parquet files write as text."""

LONGEST_LITERAL = 1 << 20
"""Characters of a text that is read as Python writes lists, which takes a hundred bytes each."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The content of a file about one sample: `fields` as read, media not decoded.

    id: names the place in messages. folder: base of relative media paths. unused: parts of the record that are not in
    `fields`, as errors and notices call them.
    """

    id: str
    folder: Path
    fields: Mapping[str, Any]
    unused: tuple[str, ...] = ()


class Fields:
    """The columns of a record. Empty ones (null, an empty text or list) are treated as absent.

    columns: the record's names for `images`, `question` and so on. A column that the user names replaces the default
    ones, which then are unused. Raises SampleError for a named column that the record lacks.
    """

    def __init__(self, record: FileRecord, columns: Mapping[str, str]) -> None:
        self.record = record
        self._columns = columns
        missing = [name for name in columns.values() if name not in record.fields]
        if missing:
            self.refuse(
                f"has no column {missing[0]!r}, which 'columns' names; found: {', '.join(record.fields)}",
                "correct 'columns' of the data source",
            )
        hidden = set(columns.values())
        if "question" in columns:
            hidden.update(QUESTION_COLUMNS)
            if columns["question"] not in ("instruction", "prompt"):  # "input" continues these
                hidden.add("input")
        if "answer" in columns:
            hidden.update(ANSWER_COLUMNS, OTHER_ANSWER_COLUMNS)
        if "question" in columns or "answer" in columns:
            hidden.update(CHAT_COLUMNS, ("texts",))
        if self.names_conversation:
            hidden.update(CHAT_COLUMNS, ("texts", "input", "history"), QUESTION_COLUMNS, ANSWER_COLUMNS)
        for kind, names in MEDIA_COLUMNS.items():
            if f"{kind}s" in columns:
                hidden.update(names, OTHER_MEDIA_COLUMNS[kind])
        kept = {key: value for key, value in record.fields.items() if key not in hidden}
        self._values = kept | {key: record.fields[name] for key, name in columns.items()}
        self._values |= {key: _messages_in(self._values[key]) for key in TURN_COLUMNS if key in self._values}
        self._there = {key: value for key, value in self._values.items() if not is_blank(value)}
        self._used: set[str] = set()
        self._inner: dict[str, None] = {}

    @property
    def names_conversation(self) -> bool:
        """True if the user names the column of the conversation."""
        return not {"messages", "conversations", "texts"}.isdisjoint(self._columns)

    def is_named(self, column: str) -> bool:
        """Return True if the user names the record's column for `column`."""
        return column in self._columns

    def has(self, name: str) -> bool:
        return name in self._there

    def knows(self, name: str) -> bool:
        """Return True if the record has this column, even if it is null."""
        return name in self._values

    def names(self) -> Iterable[str]:
        return self._there

    def peek(self, name: str) -> Any:
        """Return the value of a column without marking the column as used."""
        return self._values.get(name)

    def take(self, name: str) -> Any:
        self._used.add(name)
        return self._values[name]

    def text(self, name: str) -> str:
        """Return the value of a column as text. Raises SampleError."""
        return scalar(self.record, name, self.take(name))

    def only(self, names: Sequence[str], what: str) -> str | None:
        """Return the one of several columns that the record has, or the first of several that are equal; None for none.

        what: the columns' purpose, for errors. Raises SampleError if two of them differ.
        """
        there = [name for name in names if name in self._there]
        if not there:
            return None
        first = there[0]
        mine = self._values[first]
        if is_list(mine) and isinstance(mine[0], FileSlice):  # a path in a tar's JSON repeats the member next to it
            there = [first]
        for other in there[1:]:
            if _stripped(self._values[other]) != _stripped(mine):
                self.refuse(
                    f"has two columns for {what}, {first!r} and {other!r}",
                    "name the one to use with 'columns' of the data source",
                )
        self._used.update(there)
        return first

    def mark_unused(self, inner: str) -> None:
        """Record a key inside a column that is not used, such as `messages[].id`."""
        self._inner[inner] = None

    def unused(self) -> tuple[str, ...]:
        """Return the columns, and keys inside columns, that hold something and were not used."""
        used = {self._columns.get(name, name) for name in self._used}
        names = (key for key, value in self.record.fields.items() if key not in used and not is_blank(value))
        return (*names, *self._inner, *self.record.unused)

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        raise SampleError(self.record.id, problem, remedy)


def scalar(record: FileRecord, name: str, value: Any) -> str:
    """Return a text, number, truth value or date as text. Raises SampleError."""
    if isinstance(value, str):
        return value
    if isinstance(value, float | Decimal) and not isfinite(value):
        raise SampleError(record.id, f"{name!r} is {value}", "give text or a number")
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, bool | int | float | date | time):
        return str(value)
    raise SampleError(record.id, f"{name!r} is {kind_of(value)}", "give text")


def literal_in(value: Any) -> Any:
    """Return the list or object that a text holds as JSON or as Python writes it; any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    readers: tuple[Callable[[str], Any], ...] = (_from_json, ast.literal_eval)
    for read in readers[: 2 if len(value) <= LONGEST_LITERAL else 1]:
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            found = read(value.strip())
            return found if isinstance(found, list | dict) else value
    return value


def _messages_in(value: Any) -> Any:
    """Return the messages that a text holds; any other value unchanged."""
    found = literal_in(value)
    is_chat = bool(found) and is_objects(found) and all("role" in item or "from" in item for item in found)
    return found if is_chat else value


def _stripped(value: Any) -> list[Any]:
    return [item.strip() if isinstance(item, str) else item for item in as_list(value)]


def is_blank(value: Any) -> bool:
    """Return True for values that files write for nothing: null, an empty text or object, a list of these."""
    if isinstance(value, list | tuple):
        return all(item is None or item == "" for item in value)
    return value is None or (isinstance(value, str | bytes | dict) and len(value) == 0)


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    if isinstance(value, str | bytes | dict):
        return False
    return isinstance(value, list | tuple) or (
        isinstance(value, Sequence) and not isinstance(value, bytearray | memoryview)
    )


def as_list(value: Any) -> list[Any]:
    return list(value) if is_list(value) else [value]


def is_objects(value: Any) -> bool:
    return is_list(value) and all(isinstance(item, Mapping) for item in value)


def rows(value: Any) -> Any:
    """Convert a struct of equally long lists, as `datasets` writes a list of structs, to that list; else no change."""
    if not isinstance(value, Mapping) or not value or not all(is_list(inner) for inner in value.values()):
        return value
    if len({len(inner) for inner in value.values()}) != 1:
        return value
    return [dict(zip(value, row)) for row in zip(*value.values())]


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", int: "a number", float: "a number", bool: "a truth value"}
    return "empty" if value is None else names.get(type(value), f"a {type(value).__name__}")


def json_value(text: str | bytes, place: str, what: str = "") -> Any:
    """Parse a JSON text, called `what` in the error of the record at `place`. Raises SampleError."""
    try:
        return _from_json(text)
    except RecursionError:
        problem = "nests too deep"
    except ValueError as error:  # invalid JSON or UTF-8, or integers of thousands of digits
        problem = f"is not valid JSON: {error}"
    raise SampleError(place, f"{what} {problem}".strip(), "correct or remove it")


def _from_json(text: str | bytes) -> Any:
    return json.loads(text, object_pairs_hook=distinct)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. Raises ValueError for a key that stands in it twice, of which json would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {key!r} {'twice' if count == 2 else f'{count:,} times'}")
    return found
