"""Template engine: compile chat templates as transformers does, and render them within limits and with a fixed date.

Imports only jinja2. Templates are untrusted: loops and macros count steps, so that rendering can be stopped in any
thread or process, without signals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, datetime
from datetime import time as time_of_day
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OPEN, CLOSE = "\U0010fff9", "\U0010fffa"
"""Characters around the text that a template writes inside generation tags."""
CLOCK = "strftime_now"
"""The function by which templates write the date."""
SECONDS = 5.0
"""CPU seconds of a rendering."""
STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 100_000, 1_000, 10
"""Maximum steps of a rendering: a base, plus steps per message and per character. A loop iteration is a step."""
STEPS_OF_CALL = 10
"""Steps of a macro call."""
CHARACTERS, CHARACTERS_PER_CHARACTER = 1 << 20, 4
"""Maximum characters of a rendering: a base, plus characters per character of the conversation."""
LARGEST_VALUE = 1 << 24
"""Maximum characters or digits of a product or a power."""
_TICK, _COUNTED = "dilatant_tick", "dilatant_counted"
_STEPS_PER_LOOK = 64


class RunawayTemplate(Exception):
    """A rendering exceeds a limit, which the message names."""


class _Limits:
    """Remaining limits of a rendering. messages, characters: size of the conversation."""

    def __init__(self, messages: int, characters: int) -> None:
        self.most_steps = STEPS + STEPS_PER_MESSAGE * messages + STEPS_PER_CHARACTER * characters
        self.most_characters = CHARACTERS + CHARACTERS_PER_CHARACTER * characters
        self._steps = self._written = 0
        self._began = time.thread_time()

    def tick(self, steps: int = STEPS_OF_CALL) -> None:
        self._steps += steps
        if self._steps > self.most_steps:
            raise RunawayTemplate(f"takes more than {self.most_steps:,} steps")
        if self._steps % _STEPS_PER_LOOK < steps and time.thread_time() - self._began > SECONDS:
            raise RunawayTemplate(f"computes for more than {SECONDS:g} s")

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop, counting a step for each."""
        for value in values:
            self.tick(1)
            yield value

    def write(self, characters: int) -> None:
        self._written += characters
        if self._written > self.most_characters:
            raise RunawayTemplate(f"makes more than {self.most_characters:,} characters")


class _GenerationTags(Extension):
    """Extension for `{% generation %}`: its content is written between `OPEN` and `CLOSE`."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, which reach into Python."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        named = dict(*given, **values)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, in which loops and macros count their steps."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, day: str) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols])
        self.filters["tojson"] = _to_json
        began = datetime.combine(date.fromisoformat(day), time_of_day()) if day else None
        self.globals |= {
            "raise_exception": _refuse,
            CLOCK: lambda form: (began or datetime.now()).strftime(form),
            "dict": lambda *args, **values: dict(*args, **values),
            "namespace": _Namespace,
        }

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_COUNTED, "load"), [loop.iter], [], None, None)
        for macro in source.find_all(nodes.Macro):
            call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
            macro.body.insert(0, nodes.ExprStmt(call).set_lineno(macro.lineno))
        source.set_environment(self)
        return super()._generate(source, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        count, other = (left, right) if isinstance(left, int) else (right, left)
        size = 0
        if operator == "*" and isinstance(count, int):
            size = count * (len(other) if hasattr(other, "__len__") else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            size = right * left.bit_length()
        if size > LARGEST_VALUE:
            raise RunawayTemplate(f"computes a value of more than {LARGEST_VALUE:,} characters or digits")
        return super().call_binop(context, operator, left, right)


def render(text: str, day: str, messages: list[dict[str, Any]], characters: int, variables: Mapping[str, Any]) -> str:
    """Render a conversation, with `OPEN` and `CLOSE` around the text in generation tags.

    day: the date that the template may write, as YYYY-MM-DD; empty for today. characters: those of the conversation.
    variables: other names for the template. Raises RunawayTemplate, and whatever the template raises.
    """
    limits = _Limits(len(messages), characters)
    written = []
    counting = {_TICK: limits.tick, _COUNTED: limits.counted}
    for piece in _compiled(text, day).generate(messages=messages, **variables, **counting):
        limits.write(len(piece))
        written.append(piece)
    return "".join(written)


@lru_cache(32)
def names(text: str) -> frozenset[str]:
    """Return the variables, attributes and strings that a template names; none if it cannot be parsed."""
    try:
        tree = _Environment("").parse(text)
    except jinja2.TemplateError:
        return frozenset()
    found = {node.attr for node in tree.find_all(nodes.Getattr)}
    found |= {node.name for node in tree.find_all(nodes.Name)}
    return frozenset(found | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})


@lru_cache(32)
def _compiled(text: str, day: str) -> jinja2.Template:
    return _Environment(day).from_string(text)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template cannot hold {name!r}")
