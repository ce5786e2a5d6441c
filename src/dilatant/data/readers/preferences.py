"""Preference records: a chosen and a rejected answer to one prompt, in the forms of TRL, LLaMA-Factory and ms-swift.

Where answers have marks instead (KTO), the second answer is another record's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from dilatant.data.errors import SampleError
from dilatant.data.readers.listed_media import ListedMedia
from dilatant.data.readers.messages import parse_turns
from dilatant.data.readers.record_fields import CHAT_COLUMNS, Fields, is_objects, rows, scalar
from dilatant.data.sample import Sample, Turn

REJECTED_COLUMNS = ("rejected", "rejected_response", "rejected_messages")
Conversation = tuple[Turn, ...]


def is_preference(fields: Fields) -> bool:
    """Return True for a record with two answers, unless the user's names of columns say which one to learn."""
    if not any(map(fields.has, ("chosen", *REJECTED_COLUMNS))):
        return False
    return fields.is_named("rejected") or not (fields.names_conversation or fields.is_named("answer"))


def parse_pair(
    fields: Fields, asked: Conversation, listed: ListedMedia, again: ListedMedia
) -> tuple[Conversation, Conversation]:
    """Return the conversation with the chosen answer, and the one with the rejected answer.

    asked: the turns of a question in a column of its own. listed, again: the record's media, for each of both.
    In the turns that both have, the assistant's carry no loss. Raises SampleError.
    """
    name = fields.only(REJECTED_COLUMNS, "the rejected answer")
    if name is None:
        fields.refuse("has a chosen answer and no rejected one", "give 'rejected', or remove the record")
    chat = fields.only(CHAT_COLUMNS, "the conversation")
    if fields.has("chosen"):
        better, worse = fields.take("chosen"), fields.take(name)
        if isinstance(better, str) and isinstance(worse, str) and not (asked or chat or fields.has("prompt")):
            question, better, worse = _split(better, worse)
            asked = (Turn("user", (question,)),) if question else ()
        chosen, rejected = _answer(fields, better, listed), _answer(fields, worse, again)
        place = chat or ("prompt" if is_objects(fields.peek("prompt")) and fields.has("prompt") else None)
        if chosen and chosen[0].role != "assistant":  # whole conversations, which another column may repeat
            texts = [part for turn in chosen for part in turn.content]
            other = asked if place is None else parse_turns(fields, fields.peek(place), ListedMedia(fields))
            if any(part not in texts for turn in other for part in turn.content):
                fields.refuse("'chosen' is a conversation, and there is another one beside it", "remove that")
        else:
            _refuse_media(fields, chosen, rejected)
            before = same = asked
            if place is not None:
                before, same = (parse_turns(fields, fields.take(place), each) for each in (listed, again))
            chosen, rejected = (*before, *chosen), (*same, *rejected)
    elif chat is None:
        fields.refuse("has a rejected answer and no chosen one", "give 'chosen', or remove the record")
    else:  # the conversation ends with the chosen answer
        chosen, same = (parse_turns(fields, fields.take(chat), each) for each in (listed, again))
        rejected = _answer(fields, fields.take(name), again)
        if rejected and rejected[0].role == "assistant":
            end = max((at for at, turn in enumerate(chosen, 1) if turn.role != "assistant"), default=0)
            rejected = (*same[:end], *rejected)
    return _paired(fields, chosen, rejected)


def _answer(fields: Fields, value: Any, listed: ListedMedia) -> Conversation:
    """Parse an answer: text, a message, or a list of messages."""
    value = rows(value)
    if is_objects(value) or isinstance(value, Mapping):
        return parse_turns(fields, [value] if isinstance(value, Mapping) else value, listed)
    return (Turn("assistant", (scalar(fields.record, "the answer", value),)),)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of first items that are equal."""
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(one, other)))


def _split(better: str, worse: str) -> tuple[str, str, str]:
    """Divide two texts into their common beginning, up to a blank, and the rest of each."""
    common = better[: _common(better, worse)]
    at = max(common.rfind(" "), common.rfind("\n")) + 1
    return better[:at].strip(), better[at:], worse[at:]


def _paired(fields: Fields, chosen: Conversation, rejected: Conversation) -> tuple[Conversation, Conversation]:
    if chosen == rejected:
        fields.refuse("its chosen and its rejected answer are equal", "remove the record")
    shared = _common(chosen, rejected)
    if all(turn.role == "system" for turn in chosen[:shared]):
        fields.refuse("its answers have no prompt in common", "give it in 'prompt', or begin both with it")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[-1].role != "assistant" or len(turns) == shared:
            fields.refuse(f"its {name} conversation does not end with an answer", "add one, or remove the record")
    _refuse_media(fields, chosen[shared:], rejected[shared:])
    prompt = _unlearned(chosen[:shared])
    return (*prompt, *chosen[shared:]), (*prompt, *rejected[shared:])


def _refuse_media(fields: Fields, chosen: Conversation, rejected: Conversation) -> None:
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if any(not isinstance(part, str) for turn in turns for part in turn.content):
            fields.refuse(f"its {name} answer holds media", "give media in the prompt")


def _unlearned(turns: Conversation) -> Conversation:
    """Return the turns without loss on the assistant's."""
    return tuple(replace(turn, carries_loss=False) if turn.role == "assistant" else turn for turn in turns)


def single_answer(sample: Sample) -> Turn:
    """Return the answer of a sample that has one. Raises SampleError."""
    if sample.rejected:
        raise SampleError(sample.id, "has two answers, and kto learns from single ones", "take dpo, or give one")
    if not sample.turns or sample.turns[-1].role != "assistant":
        raise SampleError(sample.id, "does not end with an answer", "add one, or remove the record")
    if not all(isinstance(part, str) for part in sample.turns[-1].content):
        raise SampleError(sample.id, "its answer holds media", "give media in the prompt")
    return sample.turns[-1]


def with_other_answer(sample: Sample, other: Turn) -> Sample:
    """Return a sample with one answer whose rejected conversation is its prompt with the answer `other`."""
    prompt, answer = _unlearned(sample.turns[:-1]), sample.turns[-1]
    return replace(sample, turns=(*prompt, answer), rejected=(*prompt, other))
