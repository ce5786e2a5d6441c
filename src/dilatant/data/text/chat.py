"""Chat tokenization: conversations as token ids, with media positions and a mask of the assistant's tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.readers.messages import CALLS
from dilatant.data.text.chat_template import (
    PLAIN_TEMPLATE,
    PROBE,
    ChatTemplate,
    TemplateMessage,
    read_template,
    usable_template,
)
from dilatant.data.text.template_engine import CLOSE, OPEN

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MEDIA = "\U0010fffd"
"""Placeholder of a media item in text until it is tokenized."""
_EDGE = "\U0010fffc"
"""Mark at the start and end of an assistant's span. No token crosses from prompt to answer, so the ids of a prompt are
the same in training and in generation."""
BREAK = "\U0010fff8"
"""Mark inside a word that spells a token but must not become it: no token crosses or contains this character."""
RESERVED = re.compile(f"[{MEDIA}{_EDGE}{PROBE}{BREAK}{OPEN}{CLOSE}\ud800-\udfff]")
"""Characters that a text must not hold: those reserved here, and lone surrogates, which are not valid text."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Token ids of a conversation. ids: int64 [tokens], -1 for a media item. answered: bool [tokens], True where the
    assistant writes. silent: bool [tokens], True where the assistant writes in a turn without loss."""

    ids: NDArray[np.int64]
    answered: NDArray[np.bool_]
    silent: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template, made by `chat_tokenizer`. Picklable.

    The backend is a private copy with three reserved characters added; the user's tokenizer is not modified.
    added: the added tokens, which the tokenizer finds before it splits a text. special_ids: ids of the added tokens
    marked as special. opening: the token that starts a text, if any. prefix: ids that precede a text that does not
    begin with `opening`. ends: ids that end an answer, besides those of the tokenizer and the template.
    """

    backend: Tokenizer
    template: ChatTemplate
    added: frozenset[str]
    special_ids: frozenset[int]
    media_id: int
    edge_id: int
    break_id: int
    opening: str | None
    eos_id: int | None
    prefix: tuple[int, ...]
    ends: tuple[int, ...]
    fingerprint: str

    def tokens(self, messages: Sequence[TemplateMessage], for_generation: bool = False, tools: str = "") -> ChatTokens:
        """Tokenize a conversation; with `for_generation` it ends where the assistant's answer would start.

        tools: see `Sample`. Raises UserError if the template refuses the conversation.
        """
        text, spans = self._render_with_spans(messages, for_generation, tools)
        cuts = sorted({edge for span in spans for edge in span})
        edges = {cut: number for number, cut in enumerate(cuts)}
        ids, piece_of = self._encode(text, cuts)
        at_edge = (ids == self.edge_id) | (ids == self.break_id)
        by_piece = np.zeros((2, len(cuts) + 1), bool)  # the assistant writes; it writes without loss
        for (start, end), carries_loss in zip(spans, self._carry_loss(messages, spans)):
            by_piece[:, edges[start] + 1 : edges[end] + 1] = [[True], [not carries_loss]]
        ids[ids == self.media_id] = -1
        ids, marks = ids[~at_edge], by_piece[:, piece_of[~at_edge]]
        marks[0] &= ids != -1
        if messages[-1].role == "assistant" and self.eos_id is not None and marks[0].any():
            end = int(np.flatnonzero(marks[0])[-1]) + 1
            if not text[slice(*spans[-1])].rstrip().endswith((*self._ends, *self._special_tokens)):
                # If the template writes no end-of-turn token, eos is added: the model must learn to stop.
                ids = np.insert(ids, end, self.eos_id)
                marks = np.insert(marks, end, [True, marks[1, end - 1]], axis=1)
        if not text.startswith(self.opening or OPEN):
            ids = np.concatenate([np.array(self.prefix, np.int64), ids])
            marks = np.pad(marks, ((0, 0), (len(self.prefix), 0)))
        return ChatTokens(ids, *marks)

    def _encode(self, text: str, cuts: list[int]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Return the ids of a text, with marks, and the number of cuts before each. Marks stand where no token must
        cross a cut: everywhere or, if they would change the text, where one would."""
        marked = cuts
        if self._adds_blanks:
            spans = np.array(self.backend.encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
            marked = [cut for cut in cuts if ((spans[:, 0] < cut) & (cut < spans[:, 1])).any()]
        pieces = [text[start:end] for start, end in zip([0, *marked], [*marked, len(text)])]
        encoded = self.backend.encode(_EDGE.join(pieces), add_special_tokens=False)
        ids = np.array(encoded.ids, np.int64)
        if len(marked) == len(cuts):
            return ids, np.cumsum(ids == self.edge_id)
        starts = np.array(encoded.offsets, np.int64).reshape(-1, 2)[:, 0]
        return ids, np.searchsorted([cut + sum(mark < cut for mark in marked) for cut in cuts], starts, side="right")

    @cached_property
    def _adds_blanks(self) -> bool:
        """True if the tokenizer puts a blank before each text that follows a special token, as SentencePiece's does."""
        encoded = self.backend.encode(f"a{_EDGE}a", add_special_tokens=False)
        after = encoded.tokens[encoded.ids.index(self.edge_id) + 1 :]
        return bool(after) and after[0].startswith(("\u2581", "\u0120"))

    def _carry_loss(self, messages: Sequence[TemplateMessage], spans: Sequence[tuple[int, int]]) -> list[bool]:
        """Return for each span whether it carries loss. Raises UserError if spans cannot be matched to turns."""
        marks = [message.carries_loss for message in messages if message.role == "assistant"]
        if all(marks):
            return [True] * len(spans)
        if len(marks) != len(spans):
            raise UserError(
                f"the chat template has {len(spans)} {{% generation %}} spans for {len(marks)} turns of the assistant, "
                "so those without loss ('weight: 0') cannot be told; remove these turns, or choose another template"
            )
        return marks

    def last_answer(self, messages: Sequence[TemplateMessage], tools: str = "") -> str:
        """Return the assistant's last answer as the template writes it, with tool calls, without its end token. Raises
        UserError like `tokens`."""
        text, spans = self._render_with_spans(messages, False, tools)
        start, end = spans[-1]
        answer = text[start:end].rstrip()
        ends = (*self._ends, *self._special_tokens)
        closing = next((token for token in ends if answer.endswith(token)), "")
        return answer.removesuffix(closing)

    def _render_with_spans(
        self, messages: Sequence[TemplateMessage], for_generation: bool, tools: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation and return the text with the character spans that the assistant writes."""
        if self.template.tagged:
            text, tagged = self.template.render(messages, for_generation, track=True, tools=tools)
            between = self._before_tag
            return text, [
                (start - len(between) * text[:start].endswith(between), end + self._closing(text[:end], text[end:]))
                for start, end in tagged
            ]
        text, _ = self.template.render(messages, for_generation, tools=tools)
        spans: list[tuple[int, int]] = []
        for position, message in enumerate(messages):
            if message.role == "assistant":
                earliest = spans[-1][1] if spans else 0
                start, end = self._answer_span(text, messages, position, for_generation, tools, earliest)
                spans.append((max(start, earliest), end))
        return text, spans

    @cached_property
    def _before_tag(self) -> str:
        """The blank that the template writes between the generation prompt and its generation tag, if any: the model
        has to write it, and tokenizers join it to the answer's first word."""
        asked, answer = TemplateMessage("user", PROBE), TemplateMessage("assistant", PROBE)
        try:
            prompt, _ = self.template.render([asked], True)
            text, tagged = self.template.render([asked, answer], False, track=True)
        except UserError:
            return ""
        between = text[len(prompt) : tagged[0][0]] if tagged and text.startswith(prompt) else ""
        return between if between.isspace() else ""

    def _answer_span(
        self,
        text: str,
        messages: Sequence[TemplateMessage],
        position: int,
        for_generation: bool,
        tools: str,
        earliest: int,
    ) -> tuple[int, int]:
        """Return the span of one answer in `text`: from the end of its prompt to its end-of-turn token.

        Rendering the conversation with a probe in place of the answer shows what the template writes around the answer,
        whatever it does to the answer itself (trimming, hiding earlier thoughts, appending calls). If it splits the
        answer, into thoughts and the rest or into calls, a probe after the answer shows its end.
        earliest: end of the previous answer.
        """
        latest: int | None = None
        after, is_written, fits = "", False, False
        for number, answer in enumerate(_probed(messages[position])):
            talk = [*messages[:position], answer, *messages[position + 1 :]]
            try:
                around, _ = self.template.render(talk, for_generation, tools=tools)
            except UserError:  # for example, it refuses answers without calls
                continue
            before, _, after = around.partition(PROBE)
            if around.count(PROBE) != 1:
                continue
            is_written = True
            if number == 0:
                latest = _common_start(before, text)
            if CALLS in dict(answer.extras):  # the end of the call precedes a special token
                closing = [after.find(token) for token in self._special_tokens if token in after]
                after = after[min(closing, default=len(after)) :]
            fits = text.endswith(after) and (text.startswith(before) or CALLS in dict(answer.extras))
            if fits:
                break
        end = len(text) - len(after)
        start = self._prompt_end(text, latest, messages[:position], tools, earliest)
        if not is_written:
            raise UserError(
                "the chat template does not write an assistant's turn once, so its tokens cannot be told from the "
                "rest; give a template with {% generation %} tags, or set train_on: all"
            )
        if not fits or start is None or start > end:
            raise UserError(
                "the chat template writes other turns differently when an answer changes; give a template with "
                "{% generation %} tags, or set train_on: all"
            )
        end = self._before_tool(text, end, messages, position, tools)
        return start, end + self._closing(text[start:end], text[end:])

    def _before_tool(self, text: str, end: int, messages: Sequence[TemplateMessage], position: int, tools: str) -> int:
        """Return where the tool's result begins if the template writes it inside the answer's span; else `end`."""
        if position + 1 == len(messages) or messages[position + 1].role != "tool":
            return end
        probed = [*messages]
        probed[position + 1] = replace(messages[position + 1], text=PROBE)
        heard, _ = self.template.render(probed, False, tools=tools)
        if not 0 <= heard.find(PROBE) < end:
            return end
        alone, _ = self.template.render(messages[: position + 1], False, tools=tools)
        at = _common_start(alone, text)
        # Not inside a token.
        starts = [at - back for token in self.added for back in range(1, min(at, len(token) - 1) + 1)
                  if token in (alone[at - back :][: len(token)], text[at - back :][: len(token)])]  # fmt: skip
        return min(end, at, *starts)

    def _prompt_end(
        self, text: str, latest: int | None, messages: Sequence[TemplateMessage], tools: str, earliest: int
    ) -> int | None:
        """Return the end in `text` of the generation prompt after `messages`, between `earliest` and `latest`; `latest`
        without a prompt. The model must also generate text that the template writes between prompt and answer."""
        if not any(message.role == "user" for message in messages):
            return latest
        most = len(text) if latest is None else latest
        prompt, _ = self.template.render(messages, True, tools=tools)
        if text.startswith(prompt):
            return min(len(prompt), most)
        # The template may write earlier turns differently if others follow.
        asked, _ = self.template.render(messages, False, tools=tools)
        opening = prompt[len(asked) :] if prompt.startswith(asked) else ""
        at = text.rfind(opening, earliest, most) if opening else -1
        return latest if at < 0 else at + len(opening)

    def _closing(self, answer: str, rest: str) -> int:
        """Return the number of characters of `rest` up to and including the token that ends the turn; 0 if `answer`
        ends with such a token or none follows."""
        if answer.rstrip().endswith(self._ends):
            return 0
        stripped = rest.lstrip()
        following = next((end for end in self._ends if stripped.startswith(end)), "")
        if not following and not answer.endswith(self._special_tokens):
            following = next((token for token in self._special_tokens if stripped.startswith(token)), "")
        return len(rest) - len(stripped) + len(following) if following else 0

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer. They are the tokenizer's eos token, the last token that the
        template writes at the end of an assistant's turn, and `ends`."""
        last = [max((token for token in self.added if end.endswith(token)), key=len) for end in self._ends]
        ids = {*map(self.backend.token_to_id, last), *self.ends, self.eos_id}
        return tuple(sorted(one for one in ids if one is not None))

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The texts that the template writes after an answer up to the token that ends the turn, longest first."""
        tokens = sorted(self.added - self._never_end, key=len, reverse=True)
        if not tokens:
            return ()
        either = "|".join(map(re.escape, tokens))
        token, run = re.compile(either), re.compile(f"(?:{either})+")
        asked, answer = TemplateMessage("user", PROBE), TemplateMessage("assistant", PROBE)
        found: set[str] = set()
        for following in ([], [asked], [TemplateMessage("tool", PROBE)]):
            try:
                text, _ = self.template.render([asked, answer, *following], False)
            except UserError:
                continue
            pieces = text.split(PROBE)
            if len(pieces) != 3 + len(following):
                continue
            rest = pieces[2].lstrip()
            # All that follows the last answer belongs to it; before another turn, only a token that follows directly.
            end = token.match(rest) if following else run.search(rest)
            if end is not None and not rest.startswith(tuple(found)):
                found.add(rest[: end.end()])
        return tuple(sorted(found, key=len, reverse=True))

    @cached_property
    def _special_tokens(self) -> tuple[str, ...]:
        """The special tokens that may end a turn, longest first."""
        tokens = [token for each in self.special_ids if (token := self.backend.id_to_token(each))]
        return tuple(sorted({*tokens} - self._never_end, key=len, reverse=True))

    @property
    def _never_end(self) -> set[str]:
        """The token that starts a text, unless it also ends texts."""
        ends = None if self.eos_id is None else self.backend.id_to_token(self.eos_id)
        return set() if self.opening is None or self.opening == ends else {self.opening}


def chat_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
    template: str = "auto",
    *,
    day: str | None = None,
    processed: bool = False,
    ends: tuple[int, ...] = (),
) -> ChatTokenizer:
    """Prepare a tokenizer for conversations with media.

    template: `auto` (the tokenizer's own, else plain), `plain`, or a file with a Jinja template. day: the date that the
    template may write, as YYYY-MM-DD (None: today). processed: the tokenizer belongs to a transformers processor, which
    lets the tokenizer prepend its opening token. ends: ids that end an answer by the model's generation config. Raises
    UserError.
    """
    from tokenizers import AddedToken, Tokenizer

    text = _template_text(tokenizer, template)
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder()
    special = frozenset(token for token, entry in added.items() if entry.special)
    prefix = _prefix(backend) if processed else ()
    ours = (MEDIA, _EDGE, BREAK)
    backend.add_special_tokens([AddedToken(char, special=True, normalized=False) for char in ours])
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    usable = usable_template(text, named, template, day)
    parts = (backend.to_str(), text, sorted(named.items()), usable.day, prefix, ends)
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
    media_id, edge_id, break_id = (backend.encode(char, add_special_tokens=False).ids[0] for char in ours)
    return ChatTokenizer(
        backend,
        usable,
        frozenset(entry.content for entry in added.values()),
        special,
        media_id,
        edge_id,
        break_id,
        named.get("bos_token"),
        tokenizer.eos_token_id,
        prefix,
        ends,
        digest,
    )


def _common_start(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), len(other))


def _probed(answer: TemplateMessage) -> list[TemplateMessage]:
    """Return copies of an answer with a probe in its place, after it, and in its last call."""
    uncalled = tuple(extra for extra in answer.extras if extra[0] != CALLS)
    variants = [
        TemplateMessage("assistant", PROBE),
        TemplateMessage("assistant", answer.text.rstrip() + PROBE, uncalled),
    ]
    if len(uncalled) < len(answer.extras):
        calls = json.loads(dict(answer.extras)[CALLS])
        arguments = calls[-1]["function"]["arguments"]
        calls[-1]["function"]["arguments"] = {**arguments, "probe": PROBE} if isinstance(arguments, dict) else PROBE
        variants.append(TemplateMessage("assistant", answer.text, (*uncalled, (CALLS, json.dumps(calls)))))
    return variants


def _prefix(backend: Tokenizer) -> tuple[int, ...]:
    """Return the ids that a tokenizer prepends to a text."""
    text, alone = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    starts = [at for at in range(len(text)) if text[at : at + len(alone)] == alone]
    return tuple(text[: starts[0]]) if starts else ()


def _template_text(tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    if template == "plain":
        return PLAIN_TEMPLATE
    if template == "auto":
        own = tokenizer.chat_template
        if isinstance(own, dict):
            if "default" not in own:
                raise UserError(
                    f"the tokenizer has chat templates called {', '.join(map(repr, own))}, and none called 'default'; "
                    "write one of them to a file, and name it with 'data.chat_template'"
                )
            own = own["default"]
        return own or PLAIN_TEMPLATE
    return read_template(template)
