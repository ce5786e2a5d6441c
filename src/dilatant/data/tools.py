"""Tools of a conversation: what the assistant may call, its calls, and what they gave.

Records hold them as OpenAI's API and transformers' chat templates do (`tools`, `tool_calls`, the role `tool`), or as
ShareGPT's (`function_call`, `observation`). They are kept as JSON text, which only chat templates look into.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dilatant.data.errors import SampleError
from dilatant.data.json_value import json_value

CALLS = "tool_calls"
"""What a message calls its calls."""
ABOUT_ANSWERS = ("name", "tool_call_id")
"""Keys of a tool's message that say which call it answers."""


def parse_tools(record: str, value: Any) -> str:
    """JSON text of the tools that a record offers, "" for none: a list of functions, each {"type", "function"}.

    value: such a list, one of functions alone, or text that holds it. Raises SampleError.
    """
    if isinstance(value, str):
        value = json_value(value, record, "'tools' is text, which") if value.strip() else []
    if value is None:
        return ""
    if not _is_objects(value):
        raise SampleError(record, "'tools' is no list of functions", "give each its 'name' and 'parameters'")
    tools = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in map(_plain, value)
    ]
    nameless = [number for number, tool in enumerate(tools, 1) if not _is_named(tool["function"])]
    if nameless:
        raise SampleError(record, f"tool {nameless[0]} of 'tools' has no 'name'", "add it")
    return json.dumps(tools) if tools else ""


def parse_calls(record: str, where: str, value: Any) -> str:
    """JSON text of a message's calls: a list of {"type", "function": {"name", "arguments"}}, with arguments as an
    object, which templates write as they like. value: such a list or one call, without "function" around it, too; or
    text that holds it. Raises SampleError."""
    if isinstance(value, str):
        value = json_value(value, record, f"the call of {where} is text, which")
    given = [value] if isinstance(value, Mapping) else value
    if not _is_objects(given) or not given:
        raise SampleError(record, f"{where} calls no function", "give each call its 'name' and 'arguments'")
    calls = []
    for call in map(_plain, given):
        function = call.get("function", call)
        if not _is_named(function):
            raise SampleError(record, f"a call of {where} has no 'name'", "add it")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json_value(arguments or "{}", record, f"'arguments' of a call of {where}")
        kept = {"id": call["id"]} if call.get("id") is not None else {}
        calls.append(
            {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}
        )
    return json.dumps(calls)


def about_answer(message: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What a tool's message says of the call that it answers: key → JSON text."""
    return tuple(
        (key, json.dumps(message[key])) for key in ABOUT_ANSWERS if isinstance(message.get(key), str)
    )


def _is_objects(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, Mapping) for item in value)


def _is_named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def _plain(value: Any) -> Any:
    """Without the keys that a columnar file gives every object, and that hold nothing."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
