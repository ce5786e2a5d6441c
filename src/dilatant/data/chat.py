"""A conversation as token ids: chat template, media places, and which tokens the assistant writes."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.media import open_regular
from dilatant.data.sample import MediaKind

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

PLAIN_TEMPLATE = (
    "{{ bos_token | default('', true) }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + (eos_token | default('', true)) }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""Turns as they are, a line break after a question, the end token after an answer. No role names: a model trained
from scratch has none to know."""

MEDIA = "\U0010fffd"
"""Stands for a media item in text on its way through template and tokenizer."""
_EDGE = "\U0010fffc"
"""Stands where an assistant's span starts or ends, so that no token crosses from prompt to answer: the ids of a
prompt are then the same in training and in generation."""
_PROBE = "\U0010fffb"
RESERVED = re.compile(f"[{MEDIA}{_EDGE}{_PROBE}\ud800-\udfff]")
"""Characters that a text must not hold: ours, and halves of characters, which are no text."""
LONGEST_TEMPLATE = 1 << 20
"""Characters of a chat template, and those that one may add to a conversation."""
TEMPLATE_SECONDS = 20.0
"""Longest that a chat template may take for a question of one character."""


@dataclass(frozen=True, slots=True)
class Message:
    """A turn as text; every `MEDIA` character in it is one item."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """ids: int64 [tokens], `-1` where a media item stands. answered: bool [tokens], what the assistant writes."""

    ids: NDArray[np.int64]
    answered: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template; made by `chat_tokenizer`. Picklable.

    The backend is a private copy that knows two reserved characters; the user's tokenizer is left as it is.
    typed: the template wants content as a list of typed parts, not as text.
    """

    backend: Tokenizer
    template: str
    special_tokens: Mapping[str, str]
    special_ids: frozenset[int]
    media_id: int
    edge_id: int
    eos_id: int | None
    fingerprint: str
    typed: bool = False

    def tokens(self, messages: Sequence[Message], for_generation: bool = False) -> ChatTokens:
        """Token ids of a conversation; with `for_generation` it ends where the assistant's answer would start.

        Raises UserError when the template refuses the conversation.
        """
        text, spans = self._render_with_spans(messages, for_generation)
        cuts = sorted({edge for span in spans for edge in span})
        edges = {cut: number for number, cut in enumerate(cuts)}
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        ids = np.array(self.backend.encode(_EDGE.join(pieces), add_special_tokens=False).ids, np.int64)
        at_edge = ids == self.edge_id
        piece_of = np.cumsum(at_edge)
        answered_piece = np.zeros(len(pieces), bool)
        for start, end in spans:
            answered_piece[edges[start] + 1 : edges[end] + 1] = True
        answered = answered_piece[piece_of]
        ids[ids == self.media_id] = -1
        ids, answered = ids[~at_edge], answered[~at_edge] & (ids[~at_edge] != -1)
        if messages[-1].role == "assistant" and self.eos_id is not None and answered.any():
            end = int(np.flatnonzero(answered)[-1]) + 1
            if int(ids[end - 1]) not in self.special_ids:
                # A template that ends no turn would train a model that never stops.
                ids, answered = np.insert(ids, end, self.eos_id), np.insert(answered, end, True)
        return ChatTokens(ids, answered)

    def around_media(self, kind: MediaKind, marker: str) -> tuple[str, str]:
        """What the template writes before and after `marker` for a part of type `kind`, such as the tokens that
        open and close an image; nothing if it does not write the marker."""
        text = {"type": "text", "text": _PROBE}
        try:
            with_media = self._render_messages([{"role": "user", "content": [{"type": kind}, text]}])
            without = self._render_messages([{"role": "user", "content": [text]}])
        except UserError:
            return "", ""
        start, found, _ = without.partition(_PROBE)
        written, also_found, _ = with_media.partition(_PROBE)
        if not (found and also_found and written.startswith(start)):
            return "", ""
        before, found, after = written[len(start) :].partition(marker)
        return (before, after) if found else ("", "")

    def writes_text(self) -> bool:
        """Whether the template writes the text of a user's turn."""
        try:
            return self._render([Message("user", _PROBE)], False)[0].count(_PROBE) == 1
        except UserError:
            return False

    def _render_with_spans(
        self, messages: Sequence[Message], for_generation: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters of it that the assistant writes."""
        if _has_generation_tags(self.template):
            text, tagged = self._render(messages, for_generation, track=True)
            return text, [(start, end + self._closing(text[:end], text[end:])) for start, end in tagged]
        text, _ = self._render(messages, for_generation)
        spans = []
        for position, message in enumerate(messages):
            if message.role == "assistant":
                spans.append(self._answer_span(text, messages, position, for_generation))
        return text, _disjoint(spans)

    def _answer_span(
        self, text: str, messages: Sequence[Message], position: int, for_generation: bool
    ) -> tuple[int, int]:
        """Where one answer lies in `text`: from what the model is given before it writes, to its end-of-turn token.

        The same conversation with a probe for the answer tells what the template puts around it, whatever the
        template does to the answer itself (trimming, hiding earlier thoughts).
        """
        probed = [*messages]
        probed[position] = Message("assistant", _PROBE)
        around, _ = self._render(probed, for_generation)
        if around.count(_PROBE) != 1:
            raise UserError(
                "the chat template does not write an assistant's turn once, so its tokens cannot be told from the "
                "rest; give a template with {% generation %} tags, or set train_on: all"
            )
        before, _, after = around.partition(_PROBE)
        if not (text.startswith(before) and text.endswith(after)):
            raise UserError(
                "the chat template writes other turns differently when an answer changes; give a template with "
                "{% generation %} tags, or set train_on: all"
            )
        start, end = len(before), len(text) - len(after)
        # What the template writes between the generation prompt and the answer, the model has to write too.
        if any(message.role == "user" for message in messages[:position]):
            prompt, _ = self._render(messages[:position], True)
            if len(prompt) < start and text.startswith(prompt):
                start = len(prompt)
        return start, end + self._closing(text[:end], after)

    def _closing(self, answer: str, rest: str) -> int:
        """Characters of `rest` up to the special token that ends the turn; 0 if `answer` ends with one already, or
        none follows."""
        if answer.endswith(self._closing_tokens):
            return 0
        stripped = rest.lstrip()
        token = next((token for token in self._closing_tokens if stripped.startswith(token)), "")
        return len(rest) - len(stripped) + len(token) if token else 0

    @cached_property
    def _closing_tokens(self) -> tuple[str, ...]:
        """The special tokens that may end a turn, the longest first."""
        tokens = [self.backend.id_to_token(token) for token in self.special_ids]
        opening = self.special_tokens.get("bos_token")
        return tuple(sorted((token for token in tokens if token and token != opening), key=len, reverse=True))

    def _render(
        self, messages: Sequence[Message], for_generation: bool, track: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        conversation = [
            {
                "role": message.role,
                "content": [{"type": "text", "text": message.text}] if self.typed else message.text,
            }
            for message in messages
        ]
        spans: list[tuple[int, int]] = []
        text = self._render_messages(conversation, for_generation, spans if track else None)
        if len(text) > LONGEST_TEMPLATE + 4 * sum(len(message.text) for message in messages):
            raise UserError(
                f"the chat template makes {len(text):,} characters of the conversation; use another"
            )
        return text, spans

    def _render_messages(
        self,
        conversation: list[dict[str, Any]],
        for_generation: bool = False,
        spans: list[tuple[int, int]] | None = None,
    ) -> str:
        """The text of a conversation; the characters inside generation tags are added to `spans`, if given."""
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template  # annotated as if it returned one text
        try:
            texts, found = render(
                [conversation],
                chat_template=self.template,
                add_generation_prompt=for_generation,
                return_assistant_tokens_mask=spans is not None,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program
            reason = str(error) or type(error).__name__
            raise UserError(f"the chat template refuses the conversation: {reason}") from None
        if spans is not None:
            spans += found[0]
        return texts[0]


def chat_tokenizer(tokenizer: PreTrainedTokenizerFast, template: str = "auto") -> ChatTokenizer:
    """A tokenizer made ready for conversations with media.

    template: `auto` (the tokenizer's own, else plain), `plain`, or a file with a Jinja template. Raises UserError.
    """
    from tokenizers import AddedToken, Tokenizer

    text = _template_text(tokenizer, template)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    special = frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)
    backend.add_special_tokens([AddedToken(char, special=True, normalized=False) for char in (MEDIA, _EDGE)])
    named = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }
    digest = hashlib.sha256(f"{backend.to_str()}\n{text}\n{sorted(named.items())}".encode()).hexdigest()
    ids = [backend.encode(char, add_special_tokens=False).ids[0] for char in (MEDIA, _EDGE)]
    chat = ChatTokenizer(backend, text, named, special, ids[0], ids[1], tokenizer.eos_token_id, digest)
    usable = _tried(chat, template)
    if usable is None:
        raise UserError(f"the chat template ({template}) does not write the text of a user's turn")
    return usable


def _tried(chat: ChatTokenizer, template: str) -> ChatTokenizer | None:
    """The form of `chat` whose template writes text. Raises UserError for a template that comes to no end."""
    found: list[ChatTokenizer] = []

    def trial() -> None:
        found.extend(form for form in (chat, replace(chat, typed=True)) if form.writes_text())

    thread = threading.Thread(target=trial, name="dilatant-template", daemon=True)
    thread.start()
    thread.join(TEMPLATE_SECONDS)
    if thread.is_alive():
        raise UserError(
            f"the chat template ({template}) takes more than {TEMPLATE_SECONDS:g} s for one word; use another"
        )
    return found[0] if found else None


def _template_text(tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    if template == "plain":
        return PLAIN_TEMPLATE
    if template == "auto":
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        return own or PLAIN_TEMPLATE
    try:
        with open_regular(Path(template)) as file:
            return file.read(LONGEST_TEMPLATE).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"chat template {template!r} cannot be read: {error}") from None


def _has_generation_tags(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def _disjoint(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, none reaching into the one before."""
    result: list[tuple[int, int]] = []
    for start, end in spans:
        result.append((max(start, result[-1][1]) if result else start, end))
    return result
