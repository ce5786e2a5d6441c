"""Tool use in conversations: the tools that the assistant may call, its calls, and their results.

Records use the form of OpenAI's API and transformers' chat templates (`tools`, `tool_calls`, the role `tool`) or of
ShareGPT (`function_call`, `observation`). Tools and calls are kept as JSON text, which only chat templates read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dilatant.data.errors import SampleError
from dilatant.data.readers.record_fields import is_objects, json_value, rows

CALLS = "tool_calls"
"""A message's key for its tool calls."""


def parse_tools(record: str, value: Any) -> str:
    """Return the tools that a record offers as JSON text: a list of {"type", "function"}; "" for none.

    value: such a list, a list of bare functions, or text that holds one. Raises SampleError.
    """
    if isinstance(value, str):
        value = json_value(value, record, "'tools' is text, which") if value.strip() else []
    if value is None:
        return ""
    value = rows(value)
    if not is_objects(value):
        raise SampleError(record, "'tools' is no list of functions", "give each its 'name' and 'parameters'")
    tools = [
        tool if "function" in tool else {"type": "function", "function": tool}
        for tool in map(without_null, value)
    ]
    nameless = [number for number, tool in enumerate(tools, 1) if not _is_named(tool["function"])]
    if nameless:
        raise SampleError(record, f"tool {nameless[0]} of 'tools' has no 'name'", "add it")
    return json.dumps(tools) if tools else ""


def parse_calls(record: str, where: str, value: Any) -> str:
    """Return a message's tool calls as JSON text: a list of {"type", "function": {"name", "arguments"}} with arguments
    as an object, which templates format themselves. value: such a list or one call, with or without "function" around
    it; or text that holds it. Raises SampleError."""
    if isinstance(value, str):
        value = json_value(value, record, f"the call of {where} is text, which")
    value = rows(value)
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
        calls.append(
            {"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}}
        )
    return json.dumps(calls)


def _is_named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


def without_null(value: Any) -> Any:
    """Remove the null keys that a columnar file gives every object."""
    if isinstance(value, Mapping):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    return [without_null(inner) for inner in value] if isinstance(value, list) else value
