"""Messages of a conversation: parse the formats in use (OpenAI, ShareGPT, pairs) into turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dilatant.data.errors import SampleError
from dilatant.data.readers.listed_media import ITEM_OPTIONS, ListedMedia, parse_media
from dilatant.data.readers.record_fields import (
    MEDIA_COLUMNS,
    Fields,
    is_blank,
    is_list,
    is_objects,
    json_value,
    kind_of,
    literal_in,
    rows,
    scalar,
)
from dilatant.data.sample import Media, MediaKind, Role, Turn

CALLS = "tool_calls"
"""A message's key for its tool calls."""
CALL_KEYS = (CALLS, "function_call")
"""Keys that messages have for calls; the second is an earlier one of OpenAI, for a single call."""


def parse_tools(record: str, value: Any) -> str:
    """Return the tools that a record offers as JSON text: a list of {"type", "function"}; "" for none.

    value: such a list, a list of bare functions, or text that holds one. Raises SampleError.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    value = _unpacked(value, record, "'tools' is text, which")
    if not is_objects(value):
        raise SampleError(record, "'tools' is no list of functions", "give each its 'name' and 'parameters'")
    tools = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in map(without_null, value)
    ]
    nameless = [number for number, tool in enumerate(tools, 1) if not _is_named(tool["function"])]
    if nameless:
        raise SampleError(record, f"tool {nameless[0]} of 'tools' has no 'name'", "add it")
    return json.dumps(tools) if tools else ""


def parse_calls(record: str, where: str, value: Any) -> str:
    """Return a message's tool calls as JSON text: a list of {"type", "function": {"name", "arguments"}} with arguments
    as an object, which templates format themselves. value: such a list or one call, with or without "function" around
    it; or text that holds it. Raises SampleError."""
    value = _unpacked(value, record, f"the call of {where} is text, which")
    given = [value] if isinstance(value, Mapping) else value
    if not is_objects(given) or not given:
        raise SampleError(record, f"{where} calls no function", "give each call its 'name' and 'arguments'")
    calls = []
    for call in map(without_null, given):
        function = call.get("function", call)
        if not _is_named(function):
            raise SampleError(record, f"a call of {where} has no 'name'", "add it")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json_value(arguments or "{}", record, f"'arguments' of a call of {where}")
        kept = {"id": call["id"]} if call.get("id") is not None else {}
        calls.append({"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}})
    return json.dumps(calls)


def _unpacked(value: Any, record: str, what: str) -> Any:
    """Return the value that a text holds, and a struct of lists as a list of structs. Raises SampleError."""
    found = literal_in(value)
    return rows(json_value(found, record, what) if isinstance(found, str) else found)


def _is_named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def without_null(value: Any) -> Any:
    """Remove the null keys that a columnar file gives every object."""
    if isinstance(value, Mapping):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value


ROLES: Mapping[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
PAIR: tuple[Role, Role] = ("user", "assistant")
ROLE_KEYS = ("role", "from")
CONTENT_KEYS = ("content", "value", "parts")
LOSS_KEYS = ("weight", "loss", "train", "trainable", "loss_mask", "loss_weight", "loss_scale")
"""Keys that set whether a message carries loss: 0 or false, 1 or true."""
_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_TYPES: Mapping[str, MediaKind] = {
    name: kind for kind in MEDIA_COLUMNS for name in (kind, f"{kind}_url", f"input_{kind}")
}
"""Types of media parts in typed content."""
_SOURCE_KEYS = ("path", "url", "bytes", "data", "base64", "source")


def parse_turns(fields: Fields, messages: Any, listed: ListedMedia) -> tuple[Turn, ...]:
    """Parse a list of messages, JSON text that holds one, or a struct of lists. Raises SampleError."""
    messages = _unpacked(messages, fields.record.id, "the conversation is text, which")
    if not is_list(messages):
        fields.refuse(f"the conversation is {kind_of(messages)}", "give a list of messages")
    return tuple(
        _Message(fields, f"message {number}", message).turn(listed) for number, message in enumerate(messages, 1)
    )


def parse_pairs(fields: Fields, name: str, listed: ListedMedia) -> tuple[Turn, ...]:
    """Parse a column that lists question and answer pairs, as {user, assistant} or [user, assistant], or messages.
    Raises SampleError."""
    pairs = _unpacked(fields.take(name), fields.record.id, f"{name!r} is text, which")
    if not is_list(pairs):
        fields.refuse(f"{name!r} is {kind_of(pairs)}", "give a list of user and assistant pairs")
    if is_objects(pairs) and any(key in pairs[0] for key in ROLE_KEYS):
        return parse_turns(fields, pairs, listed)
    turns = []
    for number, pair in enumerate(pairs, 1):
        if is_list(pair) and len(pair) == 2:
            pair = dict(zip(PAIR, pair))
        if not isinstance(pair, Mapping) or not all(role in pair for role in PAIR):
            fields.refuse(f"entry {number} of {name!r} lacks 'user' or 'assistant'", "add it")
        for key in pair.keys() - set(PAIR):
            if not is_blank(pair[key]):
                fields.mark_unused(f"{name}[].{key}")
        turns += [Turn(role, (scalar(fields.record, role, pair[role]),)) for role in PAIR]
    return tuple(turns)


class _Message:
    """Parser of one message. where: its name in errors."""

    def __init__(self, fields: Fields, where: str, message: Any) -> None:
        self._fields, self._where = fields, where
        if not isinstance(message, Mapping):
            self._refuse(f"is {kind_of(message)}", "give it 'role' and 'content'")
        self._message = message

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        self._fields.refuse(f"{self._where} {problem}", remedy)

    def turn(self, listed: ListedMedia) -> Turn:
        name = self._only(ROLE_KEYS)
        role = ROLES.get(str(name).lower())
        if role is None:
            self._refuse(f"has the role {name!r}", f"use one of {', '.join(ROLES)}")
        content = self._only(CONTENT_KEYS)
        named = [key for key in CALL_KEYS if not is_blank(self._message.get(key))]
        calls = self._message[named[0]] if named else None
        if len(named) > 1:
            self._refuse(f"has both {' and '.join(named)}", "keep one of them")
        if calls and role != "assistant":
            self._fields.mark_unused(f"messages[].{CALLS}")
            calls = None
        if str(name).lower() == "function_call":
            content, calls = "", content
        extras = self._others()
        if calls:
            text = parse_calls(self._fields.record.id, self._where, calls)
            extras = ((CALLS, text), *extras)
            content = "" if content is None else content
        if content is None:
            self._refuse("has no 'content'", "add it, or remove the message")
        return Turn(role, self._content(content, listed), extras, self._carries_loss(role))

    def _only(self, keys: Sequence[str]) -> Any:
        there = [key for key in keys if self._message.get(key) is not None]
        for other in there[1:]:
            if self._message[other] != self._message[there[0]]:
                self._refuse(f"has both {there[0]!r} and {other!r}", "keep one of them")
        return self._message[there[0]] if there else None

    def _others(self) -> tuple[tuple[str, str], ...]:
        """Return the remaining keys, which a chat template may read, as (key, JSON text)."""
        extras = []
        for key, value in self._message.items():
            if key in (*ROLE_KEYS, *CONTENT_KEYS, *LOSS_KEYS, *CALL_KEYS) or is_blank(value):
                continue
            if any(key in names for names in MEDIA_COLUMNS.values()):
                self._refuse(f"has {key!r} of its own", "list media beside the conversation, or write typed content")
            try:
                extras.append((key, json.dumps(without_null(value), default=_plain)))
            except (TypeError, ValueError):
                self._fields.mark_unused(f"messages[].{key}")
        return tuple(extras)

    def _carries_loss(self, role: Role) -> bool:
        marks = {key: self._message[key] for key in LOSS_KEYS if self._message.get(key) is not None}
        for key, value in marks.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                self._refuse(f"has the {key} {value!r:.40}", "give 0 (not learned) or 1 (learned)")
            if value and role != "assistant":
                self._refuse(
                    f"has the {key} {value!r}, but is the {role}'s",
                    "only what the assistant writes is learned; remove it, or set 'data.train_on: all'",
                )
        if len(set(map(bool, marks.values()))) > 1:
            self._refuse(f"contradicts itself: {', '.join(marks)}", "keep one of them")
        return all(marks.values())

    def _content(self, content: Any, listed: ListedMedia) -> tuple[str | Media, ...]:
        if isinstance(content, str):
            return (content,)
        content = rows(content)
        if isinstance(content, Mapping):
            content = [content]
        if not is_list(content):
            self._fields.refuse(
                f"the content of {self._where} is {kind_of(content)}", "give text or a list of typed parts"
            )
        return tuple(
            part if isinstance(part, str) else self._part(part, number, listed)
            for number, part in enumerate(content, 1)
        )

    def _part(self, part: Any, number: int, listed: ListedMedia) -> str | Media:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None and isinstance(part, Mapping):  # a part whose key is its type
            named = [key for key in ("text", *_MEDIA_TYPES) if part.get(key) is not None]
            kind = named[0] if len(named) == 1 else None
        where = f"part {number} of {self._where}"
        if not isinstance(kind, str):
            self._fields.refuse(f"{where} has no 'type'", "set it to text, image, audio or video")
        medium = _MEDIA_TYPES.get(kind)
        if kind in _TEXT_TYPES:
            if not isinstance(part.get("text"), str):
                self._fields.refuse(f"{where} is of type {kind} but has no 'text'", "add it")
            self._note_others(part, ("type", "text"))
            return str(part["text"])
        if medium is None:
            self._fields.refuse(f"{where} is of the type {kind!r}", "known: text, image, audio, video")
        # Columnar files give every part every key, most of them null.
        keys = (kind, medium, f"{medium}_url", *_SOURCE_KEYS)
        key = next((key for key in keys if not is_blank(part.get(key))), None)
        options = {option: part[option] for option in ITEM_OPTIONS & part.keys()}
        self._note_others(part, ("type", key, *options))
        if key is not None:
            value = {"data": part[key]} if key in ("data", "base64") else part[key]
            return parse_media(self._fields, medium, value, number, options)
        for option, value in options.items():
            if not is_blank(value):
                self._fields.refuse(f"{where} has the option {option!r}, which is not obeyed", "remove it")
        return listed.take(medium)

    def _note_others(self, part: Mapping[str, Any], used: Sequence[str | None]) -> None:
        for key in part.keys() - set(used):
            if not is_blank(part[key]):
                self._fields.mark_unused(f"messages[].content[].{key}")


def _plain(value: Any) -> str:
    """Convert dates and decimal numbers, which JSON lacks, to text; refuse bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes are no JSON")
    return str(value)
