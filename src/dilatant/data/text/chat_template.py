"""Chat template: the Jinja program that writes a conversation as text.

Templates are untrusted, so `usable_template` first renders one word in a separate process: a single expression can
block the interpreter or exhaust memory (`'a' * 3000000000` is evaluated while the template is compiled).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.files.own_files import open_regular
from dilatant.data.readers.messages import CALLS
from dilatant.data.sample import MediaKind
from dilatant.data.text import template_engine, template_trial

PLAIN_TEMPLATE = (
    "{{ bos_token | default('', true) }}"
    "{% if tools %}{{ (tools | tojson) + '\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | map(attribute='function') | list | tojson }}{% endif %}"
    "{{ eos_token | default('', true) }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""Writes turns unchanged, a line break after a question, the end token after an answer, tools and calls as JSON. It has
no role names, because a model trained from scratch knows none."""

PROBE = "\U0010fffb"
"""A character that no text holds; its position in the output shows where the template writes its input."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys for reasoning in messages and templates; a template that reads one of them gets the text under any of them."""
LONGEST_TEMPLATE = 1 << 20
"""Bytes of a chat template file that are read."""
TRIAL_SECONDS = 20
"""CPU seconds for the trial process to render one character, its start included."""
TRIAL_PATIENCE = 10
"""Wall-clock limit of the trial as a multiple of `TRIAL_SECONDS`, because the machine may be busy."""
TRIAL_BYTES = 1 << 30
"""Memory limit of the trial process."""


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A turn as text; every `MEDIA` character in it is one item. extras, carries_loss: see `Turn`."""

    role: str
    text: str
    extras: tuple[tuple[str, str], ...] = ()
    carries_loss: bool = True


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja chat template. special_tokens: tokens that it may name, such as `bos_token`. typed: it needs content as a
    list of typed parts. day: the date that it writes, as YYYY-MM-DD; empty if it writes none."""

    text: str
    special_tokens: tuple[tuple[str, str], ...]
    typed: bool = False
    day: str = ""

    @property
    def tagged(self) -> bool:
        """True if the template marks the assistant's text itself (`{% generation %}`)."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def reads(self, key: str) -> bool:
        """Return True if the template names a key of messages."""
        names = template_engine.names(self.text)
        return key in names or (key in THOUGHTS and not names.isdisjoint(THOUGHTS))

    def render(
        self, messages: Sequence[TemplateMessage], for_generation: bool, track: bool = False, tools: str = ""
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; with `track`, also return the character spans inside generation tags.

        tools: see `Sample`. Raises UserError if the template refuses the conversation, does not write its tools, or
        exceeds a limit of `template_engine`.
        """
        named = {key for message in messages for key, _ in message.extras} | ({"tools"} if tools else set())
        unsaid = [key for key in ("tools", CALLS) if key in named and not self.reads(key)]
        if unsaid:
            raise UserError(f"the chat template does not write {unsaid[0]!r}; choose one that does, or remove them")
        conversation = [self._as_dict(message) for message in messages]
        given = len(tools) + sum(len(m.text) + sum(len(value) for _, value in m.extras) for m in messages)
        text = self._write(conversation, for_generation, tools, given)
        return _without_tags(text) if track else (_without_tags(text)[0], [])

    def _as_dict(self, message: TemplateMessage) -> dict[str, Any]:
        """Return the message in the form that transformers passes to templates."""
        extras = {key: json.loads(value) for key, value in message.extras}
        thought = next((extras[key] for key in THOUGHTS if extras.get(key) is not None), None)
        thoughts = {} if thought is None else {THOUGHTS[0]: thought, THOUGHTS[1]: extras.get(THOUGHTS[1], thought)}
        return {
            "role": message.role,
            "content": [{"type": "text", "text": message.text}] if self.typed else message.text,
            **extras,
            **thoughts,
        }

    def _write(
        self, conversation: list[dict[str, Any]], for_generation: bool = False, tools: str = "", given: int = 1
    ) -> str:
        """Render a conversation with the engine's marks around the text in generation tags. given: characters of the
        conversation."""
        variables = {
            "tools": json.loads(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": for_generation,
            **dict(self.special_tokens),
        }
        try:
            return template_engine.render(self.text, self.day, conversation, given, variables)
        except template_engine.RunawayTemplate as error:
            raise UserError(
                f"the chat template {error} for {len(conversation)} messages of {given:,} characters; use another with "
                "'data.chat_template'"
            ) from None
        except Exception as error:  # a template can raise anything
            reason = str(error) or type(error).__name__
            raise UserError(f"the chat template refuses the conversation: {reason}") from None

    def around_media(self, kind: MediaKind, marker: str) -> tuple[str, str]:
        """Return the texts before and after `marker` for a part of type `kind`, such as the tokens that open and close
        an image. They are empty if the template does not write the marker."""
        text = {"type": "text", "text": PROBE}
        try:
            with_media = self._write([{"role": "user", "content": [{"type": kind}, text]}])
            without = self._write([{"role": "user", "content": [text]}])
        except UserError:
            return "", ""
        start, found, _ = _without_tags(without)[0].partition(PROBE)
        written, also_found, _ = _without_tags(with_media)[0].partition(PROBE)
        if not (found and also_found and written.startswith(start)):
            return "", ""
        before, found, after = written[len(start) :].partition(marker)
        return (before, after) if found else ("", "")

    def writes_text(self) -> bool:
        """Return True if the template writes the text of a user's turn."""
        try:
            return self.render([TemplateMessage("user", PROBE)], False)[0].count(PROBE) == 1
        except UserError:
            return False


def _without_tags(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without the engine's marks of generation tags, and the spans between those marks."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for piece in re.split(f"[{template_engine.OPEN}{template_engine.CLOSE}]", text):
        if len(pieces) % 2:
            spans.append((at, at + len(piece)))
        pieces.append(piece)
        at += len(piece)
    return "".join(pieces), spans


def usable_template(text: str, special_tokens: Mapping[str, str], name: str, day: str | None = None) -> ChatTemplate:
    """Return the template with the content form, plain or typed, with which it writes a user's turn.

    name: the user's name for the template, for errors. day: the date that it writes (None: today). Raises UserError if
    neither form works, or if the template takes longer than `TRIAL_SECONDS` or exceeds a limit.
    """
    writes_day = template_engine.CLOCK in text
    day = (day or datetime.now().date().isoformat()) if writes_day else ""
    template = ChatTemplate(text, tuple(sorted(special_tokens.items())), day=day)
    if text != PLAIN_TEMPLATE:
        _try(template, name)
    usable = next((form for form in (template, replace(template, typed=True)) if form.writes_text()), None)
    if usable is None:
        raise UserError(f"the chat template ({name}) does not write the text of a user's turn")
    return usable


def read_template(path: str) -> str:
    """Return the text of a template file. Raises UserError."""
    with as_user_error(f"chat template {path!r} cannot be read", OSError, ValueError), open_regular(Path(path)) as file:
        return file.read(LONGEST_TEMPLATE).decode("utf-8")


@cache
def _try(template: ChatTemplate, name: str) -> None:
    """Render the template in a separate process. Raises UserError if rendering it in this process is not safe."""
    asked = json.dumps([template.text, dict(template.special_tokens)])
    command = [sys.executable, "-P", "-m", template_trial.__name__, str(TRIAL_BYTES), str(TRIAL_SECONDS)]
    try:
        ended = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=TRIAL_PATIENCE * TRIAL_SECONDS
        )
        code, said = ended.returncode, ended.stdout.strip()
    except subprocess.TimeoutExpired:
        code, said = -signal.SIGXCPU, ""
    if code == 0:
        return
    if code == template_trial.RUNAWAY:
        raise UserError(f"the chat template ({name}) {said} for one word; use another")
    took = {
        -signal.SIGXCPU: f"more than {TRIAL_SECONDS} s",
        template_trial.TOO_LARGE: f"more than {TRIAL_BYTES >> 20} MiB",
    }.get(code, "all there is")
    raise UserError(f"the chat template ({name}) takes {took} for one word; use another")
