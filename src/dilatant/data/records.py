"""A record as people write it, in any of the known forms, as a `Sample`.

The form is told by the keys of the record: `messages` (OpenAI, TRL), `conversations` (LLaVA, ShareGPT), `texts`
(FineVision), `prompt` and `completion` (TRL), or a question and an answer in columns of their own.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote

from dilatant.data.errors import SampleError
from dilatant.data.json_value import json_value
from dilatant.data.sample import FileSlice, Media, MediaKind, Role, Sample, Turn
from dilatant.data.tools import CALLS, about_answer, parse_calls, parse_tools

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
PAIR: tuple[Role, Role] = ("user", "assistant")
MEDIA_COLUMNS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("images", "image"),
    "audio": ("audios", "audio"),
    "video": ("videos", "video"),
}
_MEDIA_TYPES: Mapping[str, MediaKind] = {
    name: kind for kind in MEDIA_COLUMNS for name in (kind, f"{kind}_url", f"input_{kind}")
}
"""What typed parts call media."""
QUESTION_COLUMNS = ("question", "query", "instruction", "prompt")
ANSWER_COLUMNS = ("answer", "response", "completion", "output", "caption", "captions", "text", "label")


@dataclass(frozen=True, slots=True)
class Record:
    """What a file holds about one sample: `fields` as read, media not decoded.

    id names the place for messages. folder is what relative media paths start from.
    """

    id: str
    folder: Path
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Runs of records that are read together at no more cost than one, such as the row groups of Parquet.

    lengths: records of each run. window: runs that a reader can keep at hand. groups: the group that each run belongs
    to, counted from 0, where several runs can only be read one after another; without it each is a group of its own.
    """

    lengths: tuple[int, ...]
    window: int
    groups: tuple[int, ...] = ()


def parse_record(
    record: Record, prompt: str | None = None, columns: Mapping[str, str] | None = None
) -> Sample:
    """The sample that a record holds.

    prompt: the question to ask where the record has an answer but no question.
    columns: other names for `images`, `audios`, `question`, `answer`, `messages`, `conversations`, `texts`.
    Raises SampleError naming the record and what was found in it.
    """
    fields = _renamed(record, columns or {})
    listed = _ListedMedia(record, fields)
    tools = ""
    chat = next((name for name in ("messages", "conversations") if _present(fields, name)), None)
    if chat is not None:
        turns = _turns(record, fields[chat], listed)
        tools = parse_tools(record.id, fields.get("tools"))
    elif _present(fields, "texts"):
        turns = _pairs(record, fields["texts"])
    elif _is_chat(fields.get("prompt")) and _present(fields, "completion"):
        turns = _turns(record, fields["prompt"], listed) + _completion(record, fields["completion"], listed)
    else:
        turns = _question_and_answer(record, fields, prompt)
    if isinstance(fields.get("system"), str) and fields["system"] and turns and turns[0].role != "system":
        turns = (Turn("system", (fields["system"],)), *turns)
    if not turns:
        raise SampleError(record.id, "the conversation is empty", "remove the record")
    return Sample(record.id, turns, tuple(listed), tools)


def parse_prompt(record: Record) -> Sample:
    """The sample that a record holds, which may end with a question. Raises SampleError as `parse_record`."""
    fields = record.fields
    chats = any(_present(fields, name) for name in ("messages", "conversations", "texts"))
    question = next((name for name in QUESTION_COLUMNS if _present(fields, name)), None)
    answered = any(_present(fields, name) for name in ANSWER_COLUMNS)
    if chats or answered or question is None or _is_chat(fields[question]):
        return parse_record(record)
    turns: tuple[Turn, ...] = (Turn("user", (_scalar(record, question, fields[question]),)),)
    system = fields.get("system")
    if isinstance(system, str) and system:
        turns = (Turn("system", (system,)), *turns)
    return Sample(record.id, turns, tuple(_ListedMedia(record, fields)))


def _renamed(record: Record, columns: Mapping[str, str]) -> Mapping[str, Any]:
    if not columns:
        return record.fields
    missing = [name for name in columns.values() if name not in record.fields]
    if missing:
        raise SampleError(
            record.id,
            f"has no column {missing[0]!r}, which 'columns' names; found: {', '.join(record.fields)}",
            "correct 'columns' of the data source",
        )
    given = {key: record.fields[name] for key, name in columns.items()}
    # What the user names replaces what would be found by habit.
    hidden = set(columns.values())
    if "question" in columns:
        hidden.update(QUESTION_COLUMNS)
    if "answer" in columns:
        hidden.update(ANSWER_COLUMNS)
    for kind, names in MEDIA_COLUMNS.items():
        if f"{kind}s" in columns:
            hidden.update(names)
    return {**{key: value for key, value in record.fields.items() if key not in hidden}, **given}


class _ListedMedia:
    """The media columns of a record. Typed content without a source takes the next one; the rest is iterated."""

    def __init__(self, record: Record, fields: Mapping[str, Any]) -> None:
        self._record = record
        self._waiting: dict[MediaKind, list[Media]] = {}
        for kind, names in MEDIA_COLUMNS.items():
            # An empty path is how some sets write that a record has no image.
            value = next(
                (fields[name] for name in names if _present(fields, name) and fields[name] != ""), None
            )
            values: Sequence[Any] = () if value is None else value if _is_list(value) else (value,)
            self._waiting[kind] = [
                _media(record, kind, item, position) for position, item in enumerate(values, 1)
            ]

    def take(self, kind: MediaKind) -> Media:
        if not self._waiting[kind]:
            raise SampleError(
                self._record.id,
                f"the messages name more {kind}s than the record holds",
                f"give each {kind} part its source, or list every {kind} in the record",
            )
        return self._waiting[kind].pop(0)

    def __iter__(self) -> Iterator[Media]:
        for waiting in self._waiting.values():
            yield from waiting


def _media(record: Record, kind: MediaKind, value: Any, position: int) -> Media:
    name = f"{kind} {position}"
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        if inner is None:
            inner = next((value[key] for key in ("path", "url", "data", "file_name") if value.get(key)), None)
        if isinstance(value.get("path"), str):
            name = value["path"]
        if inner is None:
            raise SampleError(record.id, f"{name} has neither 'bytes' nor 'path'", "give one of them")
        if value.get("data") is inner and isinstance(inner, str):
            return Media(kind, _base64(record, name, inner), name)
        value = inner
    if isinstance(value, FileSlice):
        return Media(kind, value, name)
    if isinstance(value, bytes | bytearray | memoryview):
        return Media(kind, bytes(value), name)
    if isinstance(value, str):
        if value.startswith("data:"):
            return Media(kind, _base64(record, name, value.partition(",")[2]), name)
        if value.startswith(("http://", "https://", "s3://", "gs://", "hf://")):
            raise SampleError(
                record.id,
                f"{value!r} is a remote address",
                "download the media and give paths relative to the file",
            )
        text = unquote(value.removeprefix("file://")) if value.startswith("file://") else value
        return Media(kind, record.folder / text, value)
    raise SampleError(
        record.id, f"{name} is {_kind_of(value)}", "give a path, encoded bytes or a data: address"
    )


def _base64(record: Record, name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SampleError(record.id, f"{name} is not valid base64", "encode it again") from None


def _turns(record: Record, messages: Any, listed: _ListedMedia) -> tuple[Turn, ...]:
    if isinstance(messages, str):
        messages = json_value(messages, record.id, "the conversation is text, which")
    if not _is_list(messages):
        raise SampleError(record.id, f"the conversation is {_kind_of(messages)}", "give a list of messages")
    turns = []
    for number, message in enumerate(messages, 1):
        where = f"message {number}"
        if not isinstance(message, Mapping):
            raise SampleError(record.id, f"{where} is {_kind_of(message)}", "give it 'role' and 'content'")
        name = message.get("role", message.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise SampleError(record.id, f"{where} has the role {name!r}", f"use one of {', '.join(ROLES)}")
        content = message.get("content", message.get("value"))
        extras = about_answer(message) if role == "tool" else ()
        calls = message.get(CALLS) if role == "assistant" else None
        if str(name).lower() == "function_call":
            content, calls = "", content
        if calls:
            extras = ((CALLS, parse_calls(record.id, where, calls)),)
            content = "" if content is None else content
        if content is None:
            raise SampleError(record.id, f"{where} has no 'content'", "add it, or remove the message")
        turns.append(Turn(role, _content(record, where, content, listed), extras))
    return tuple(turns)


def _content(record: Record, where: str, content: Any, listed: _ListedMedia) -> tuple[str | Media, ...]:
    if isinstance(content, str):
        return (content,)
    if isinstance(content, Mapping):
        content = [content]
    if not _is_list(content):
        raise SampleError(
            record.id, f"the content of {where} is {_kind_of(content)}", "give text or a list of typed parts"
        )
    parts: list[str | Media] = []
    for number, part in enumerate(content, 1):
        if isinstance(part, str):
            parts.append(part)
            continue
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise SampleError(
                record.id, f"part {number} of {where} has no 'type'", "set it to text, image, audio or video"
            )
        kind = part["type"]
        if kind == "text":
            if not isinstance(part.get("text"), str):
                raise SampleError(
                    record.id, f"part {number} of {where} is of type text but has no 'text'", "add it"
                )
            parts.append(part["text"])
        elif medium := _MEDIA_TYPES.get(kind):
            value = _part_source(part, kind, medium)
            if value is None:
                parts.append(listed.take(medium))
            else:
                parts.append(_media(record, medium, value, number))
        else:
            raise SampleError(
                record.id,
                f"part {number} of {where} is of the type {kind!r}",
                "known: text, image, audio, video",
            )
    return tuple(parts)


def _part_source(part: Mapping[str, Any], kind: str, medium: str) -> Any:
    # Columnar files give every part every key, most of them null.
    keys = (kind, medium, f"{medium}_url", "path", "url", "bytes", "data")
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    if value is not None and value is part.get("data"):
        return {"data": value}
    return value


def _pairs(record: Record, texts: Any) -> tuple[Turn, ...]:
    if not _is_list(texts):
        raise SampleError(
            record.id, f"'texts' is {_kind_of(texts)}", "give a list of user and assistant pairs"
        )
    turns = []
    for number, pair in enumerate(texts, 1):
        if not isinstance(pair, Mapping) or not all(role in pair for role in PAIR):
            raise SampleError(record.id, f"entry {number} of 'texts' lacks 'user' or 'assistant'", "add it")
        turns += [Turn(role, (_scalar(record, role, pair[role]),)) for role in PAIR]
    return tuple(turns)


def _completion(record: Record, completion: Any, listed: _ListedMedia) -> tuple[Turn, ...]:
    if isinstance(completion, str):
        return (Turn("assistant", (completion,)),)
    return _turns(record, completion, listed)


def _question_and_answer(record: Record, fields: Mapping[str, Any], prompt: str | None) -> tuple[Turn, ...]:
    question = next((name for name in QUESTION_COLUMNS if _present(fields, name)), None)
    answer = next((name for name in ANSWER_COLUMNS if _present(fields, name)), None)
    if answer is None:
        raise SampleError(
            record.id,
            f"is of no known form; found the fields {', '.join(sorted(fields)) or '(none)'}",
            "give 'messages', 'conversations', 'texts', or a question and an answer (name yours with 'columns')",
        )
    value = fields[answer]
    if _is_list(value):
        if not value:
            raise SampleError(record.id, f"{answer!r} is empty", "remove the record")
        value = value[0]
    reply = Turn("assistant", (_scalar(record, answer, value),))
    asked = prompt if question is None else _scalar(record, question, fields[question])
    has_media = any(_present(fields, name) for names in MEDIA_COLUMNS.values() for name in names)
    if asked is None and not has_media:
        return (reply,)
    return (Turn("user", (asked,) if asked else ()), reply)


def _scalar(record: Record, name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not isfinite(value):
        raise SampleError(record.id, f"{name!r} is {value}", "give text or a number")
    if isinstance(value, bool | int | float):
        return str(value)
    raise SampleError(record.id, f"{name!r} is {_kind_of(value)}", "give text")


def _present(fields: Mapping[str, Any], name: str) -> bool:
    return fields.get(name) is not None


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _is_chat(value: Any) -> bool:
    return _is_list(value) and all(isinstance(item, Mapping) for item in value)


def _kind_of(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        int: "a number",
        float: "a number",
        bool: "a truth value",
    }
    return "empty" if value is None else names.get(type(value), f"a {type(value).__name__}")
