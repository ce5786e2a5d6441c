"""A chat template: the program that writes a conversation as text.

It may be anybody's program, so `usable_template` first tries it on one word in a process of its own: one expression can
hold an interpreter or take all memory (`'a' * 3000000000` is computed while the template is compiled).
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

from dilatant.config.errors import UserError
from dilatant.config.files.own_files import open_regular
from dilatant.data.readers.tools import CALLS
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
"""Turns as they are, a line break after a question, the end token after an answer; tools and calls as JSON. No role
names: a model trained from scratch has none to know."""

PROBE = "\U0010fffb"
"""A character that no text holds: where it comes out, the template has written what it was given."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""What messages and templates call thoughts; a template that reads one of these names gets what a message has under
another."""
LONGEST_TEMPLATE = 1 << 20
"""Characters of a chat template."""
TRIAL_SECONDS = 20
"""Longest that a processor may work at a question of one character, the start of a process included."""
TRIAL_PATIENCE = 10
"""Times as long as that by the clock: a busy machine takes its time."""
TRIAL_BYTES = 1 << 30
"""Memory that it may take for it."""


@dataclass(frozen=True, slots=True)
class Message:
    """A turn as text; every `MEDIA` character in it is one item. extras, carries_loss: as of `Turn`."""

    role: str
    text: str
    extras: tuple[tuple[str, str], ...] = ()
    carries_loss: bool = True


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """text: the Jinja program. special_tokens: what it may name, such as `bos_token`. typed: it wants content as a list
    of typed parts, not as text. day: the date that it writes, as YYYY-MM-DD; empty for one that writes none."""

    text: str
    special_tokens: tuple[tuple[str, str], ...]
    typed: bool = False
    day: str = ""

    @property
    def tagged(self) -> bool:
        """Whether it tells itself what the assistant writes (`{% generation %}`)."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def reads(self, key: str) -> bool:
        """Whether the template names a key of messages."""
        names = template_engine.names(self.text)
        return key in names or (key in THOUGHTS and not names.isdisjoint(THOUGHTS))

    def render(
        self, messages: Sequence[Message], for_generation: bool, track: bool = False, tools: str = ""
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and with `track` the characters of it inside generation tags.

        tools: as of `Sample`. Raises UserError when the template refuses the conversation, says nothing of tools, or
        goes beyond a limit of `template_engine`.
        """
        named = {key for message in messages for key, _ in message.extras} | ({"tools"} if tools else set())
        unsaid = [key for key in ("tools", CALLS) if key in named and not self.reads(key)]
        if unsaid:
            raise UserError(
                f"the chat template does not write {unsaid[0]!r}; choose one that does, or remove them"
            )
        conversation = [self._as_dict(message) for message in messages]
        given = len(tools) + sum(len(m.text) + sum(len(value) for _, value in m.extras) for m in messages)
        text = self._write(conversation, for_generation, tools, given)
        return _without_tags(text) if track else (_without_tags(text)[0], [])

    def _as_dict(self, message: Message) -> dict[str, Any]:
        """The message as transformers hands it to templates."""
        extras = {key: json.loads(value) for key, value in message.extras}
        thought = next((extras[key] for key in THOUGHTS if extras.get(key) is not None), None)
        thoughts = (
            {} if thought is None else {THOUGHTS[0]: thought, THOUGHTS[1]: extras.get(THOUGHTS[1], thought)}
        )
        return {
            "role": message.role,
            "content": [{"type": "text", "text": message.text}] if self.typed else message.text,
            **extras,
            **thoughts,
        }

    def _write(
        self,
        conversation: list[dict[str, Any]],
        for_generation: bool = False,
        tools: str = "",
        given: int = 1,
    ) -> str:
        """The text of a conversation with the engine's marks around what stands in generation tags. given: characters
        of the conversation."""
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
        except Exception as error:  # a template is a program
            reason = str(error) or type(error).__name__
            raise UserError(f"the chat template refuses the conversation: {reason}") from None

    def around_media(self, kind: MediaKind, marker: str) -> tuple[str, str]:
        """What the template writes before and after `marker` for a part of type `kind`, such as the tokens that
        open and close an image; nothing if it does not write the marker."""
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
        """Whether the template writes the text of a user's turn."""
        try:
            return self.render([Message("user", PROBE)], False)[0].count(PROBE) == 1
        except UserError:
            return False


def _without_tags(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the engine's marks of generation tags, and the characters that stood between them."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for piece in re.split(f"[{template_engine.OPEN}{template_engine.CLOSE}]", text):
        if len(pieces) % 2:
            spans.append((at, at + len(piece)))
        pieces.append(piece)
        at += len(piece)
    return "".join(pieces), spans


def usable_template(
    text: str, special_tokens: Mapping[str, str], name: str, day: str | None = None
) -> ChatTemplate:
    """The template in the form, plain or typed, in which it writes a user's turn.

    name: what the user calls it, for errors. day: the date that it writes (None: today). Raises UserError when there is
    none, or when the template comes to no end within `TRIAL_SECONDS` or goes beyond a limit.
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
    """The text of a file with a template. Raises UserError."""
    try:
        with open_regular(Path(path)) as file:
            return file.read(LONGEST_TEMPLATE).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"chat template {path!r} cannot be read: {error}") from None


@cache
def _try(template: ChatTemplate, name: str) -> None:
    """Raises UserError for a template that cannot be rendered here, in a thread of a process that must go on."""
    asked = json.dumps([template.text, dict(template.special_tokens)])
    command = [sys.executable, "-P", "-m", template_trial.__name__, str(TRIAL_BYTES), str(TRIAL_SECONDS)]
    try:
        ended = subprocess.run(
            command,
            input=asked,
            capture_output=True,
            text=True,
            timeout=TRIAL_PATIENCE * TRIAL_SECONDS,
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
