"""A conversation as token ids: chat template, media places, and which tokens the assistant writes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.chat_template import (
    PLAIN_TEMPLATE,
    PROBE,
    ChatTemplate,
    Message,
    read_template,
    usable_template,
)
from dilatant.data.tools import CALLS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MEDIA = "\U0010fffd"
"""Stands for a media item in text on its way through template and tokenizer."""
_EDGE = "\U0010fffc"
"""Stands where an assistant's span starts or ends, so that no token crosses from prompt to answer: the ids of a
prompt are then the same in training and in generation."""
RESERVED = re.compile(f"[{MEDIA}{_EDGE}{PROBE}\ud800-\udfff]")
"""Characters that a text must not hold: ours, and halves of characters, which are no text."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """ids: int64 [tokens], `-1` where a media item stands. answered: bool [tokens], what the assistant writes. silent:
    bool [tokens], what it writes in turns that carry no loss."""

    ids: NDArray[np.int64]
    answered: NDArray[np.bool_]
    silent: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template; made by `chat_tokenizer`. Picklable.

    The backend is a private copy that knows two reserved characters; the user's tokenizer is left as it is.
    opening: the token that starts a text, if there is one.
    """

    backend: Tokenizer
    template: ChatTemplate
    special_ids: frozenset[int]
    media_id: int
    edge_id: int
    opening: str | None
    eos_id: int | None
    fingerprint: str

    def tokens(
        self, messages: Sequence[Message], for_generation: bool = False, tools: str = ""
    ) -> ChatTokens:
        """Token ids of a conversation; with `for_generation` it ends where the assistant's answer would start.

        tools: as of `Sample`. Raises UserError when the template refuses the conversation.
        """
        text, spans = self._render_with_spans(messages, for_generation, tools)
        cuts = sorted({edge for span in spans for edge in span})
        edges = {cut: number for number, cut in enumerate(cuts)}
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        ids = np.array(self.backend.encode(_EDGE.join(pieces), add_special_tokens=False).ids, np.int64)
        at_edge = ids == self.edge_id
        piece_of = np.cumsum(at_edge)
        answered_piece = np.zeros(len(pieces), bool)
        silent_piece = np.zeros(len(pieces), bool)
        for (start, end), carries_loss in zip(spans, self._carry_loss(messages, spans)):
            answered_piece[edges[start] + 1 : edges[end] + 1] = True
            silent_piece[edges[start] + 1 : edges[end] + 1] = not carries_loss
        answered, silent = answered_piece[piece_of], silent_piece[piece_of]
        ids[ids == self.media_id] = -1
        ids, answered, silent = ids[~at_edge], answered[~at_edge] & (ids[~at_edge] != -1), silent[~at_edge]
        if messages[-1].role == "assistant" and self.eos_id is not None and answered.any():
            end = int(np.flatnonzero(answered)[-1]) + 1
            if int(ids[end - 1]) not in self.special_ids:
                # A template that ends no turn would train a model that never stops.
                ids, answered = np.insert(ids, end, self.eos_id), np.insert(answered, end, True)
                silent = np.insert(silent, end, silent[end - 1])
        return ChatTokens(ids, answered, silent)

    def _carry_loss(self, messages: Sequence[Message], spans: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each span is learned. Raises UserError where it cannot be told whose turn a span is."""
        marks = [message.carries_loss for message in messages if message.role == "assistant"]
        if all(marks):
            return [True] * len(spans)
        if len(marks) != len(spans):
            raise UserError(
                f"the chat template has {len(spans)} {{% generation %}} spans for {len(marks)} turns of the assistant, "
                "so those without loss ('weight: 0') cannot be told; remove these turns, or choose another template"
            )
        return marks

    def last_answer(self, messages: Sequence[Message], tools: str = "") -> str:
        """The assistant's last answer as the template writes it, calls of tools with it, without the token that ends
        it. Raises UserError as `tokens`."""
        text, spans = self._render_with_spans(messages, False, tools)
        start, end = spans[-1]
        answer = text[start:end].rstrip()
        closing = next((token for token in self._closing_tokens if answer.endswith(token)), "")
        return answer.removesuffix(closing)

    def _render_with_spans(
        self, messages: Sequence[Message], for_generation: bool, tools: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters of it that the assistant writes."""
        if self.template.tagged:
            text, tagged = self.template.render(messages, for_generation, track=True, tools=tools)
            return text, [(start, end + self._closing(text[:end], text[end:])) for start, end in tagged]
        text, _ = self.template.render(messages, for_generation, tools=tools)
        spans = []
        for position, message in enumerate(messages):
            if message.role == "assistant":
                spans.append(self._answer_span(text, messages, position, for_generation, tools))
        return text, _disjoint(spans)

    def _answer_span(
        self, text: str, messages: Sequence[Message], position: int, for_generation: bool, tools: str
    ) -> tuple[int, int]:
        """Where one answer lies in `text`: from what the model is given before it writes, to its end-of-turn token.

        The same conversation with a probe for the answer tells what the template puts around it, whatever the
        template does to the answer itself (trimming, hiding earlier thoughts, writing calls behind it).
        """
        probed = [*messages]
        kept = tuple(extra for extra in messages[position].extras if extra[0] != CALLS)
        probed[position] = Message("assistant", PROBE, kept)
        around, _ = self.template.render(probed, for_generation, tools=tools)
        if around.count(PROBE) != 1:
            raise UserError(
                "the chat template does not write an assistant's turn once, so its tokens cannot be told from the "
                "rest; give a template with {% generation %} tags, or set train_on: all"
            )
        before, _, after = around.partition(PROBE)
        if not (text.startswith(before) and text.endswith(after)):
            raise UserError(
                "the chat template writes other turns differently when an answer changes; give a template with "
                "{% generation %} tags, or set train_on: all"
            )
        start, end = len(before), len(text) - len(after)
        # What the template writes between the generation prompt and the answer, the model has to write too.
        if any(message.role == "user" for message in messages[:position]):
            prompt, _ = self.template.render(messages[:position], True, tools=tools)
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
        return tuple(
            sorted((token for token in tokens if token and token != self.opening), key=len, reverse=True)
        )


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
    usable = usable_template(text, named, template)
    opening = named.get("bos_token")
    return ChatTokenizer(backend, usable, special, ids[0], ids[1], opening, tokenizer.eos_token_id, digest)


def _template_text(tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    if template == "plain":
        return PLAIN_TEMPLATE
    if template == "auto":
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        return own or PLAIN_TEMPLATE
    return read_template(template)


def _disjoint(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, none reaching into the one before."""
    result: list[tuple[int, int]] = []
    for start, end in spans:
        result.append((max(start, result[-1][1]) if result else start, end))
    return result
