"""Records: parse a record of any known format into a `Sample`.

The columns tell the format: `messages` (OpenAI, TRL) or `conversations` (LLaVA, ShareGPT), `texts` (FineVision),
`prompt` and `completion` (TRL), a question and an answer in separate columns (Alpaca, VQA), or two answers to one
prompt (see `preferences`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from dilatant.data.errors import SampleError
from dilatant.data.media.media_kind import kind_of_name
from dilatant.data.readers.listed_media import ListedMedia
from dilatant.data.readers.messages import parse_pairs, parse_tools, parse_turns
from dilatant.data.readers.preferences import is_preference, parse_pair
from dilatant.data.readers.record_fields import (
    ANSWER_COLUMNS,
    CHAT_COLUMNS,
    OTHER_ANSWER_COLUMNS,
    QUESTION_COLUMNS,
    Fields,
    FileRecord,
    is_blank,
    is_list,
    is_objects,
    kind_of,
    literal_in,
    scalar,
)
from dilatant.data.sample import Sample, Turn

CHOICE_COLUMNS = ("options", "choices")
_NUMBER = re.compile(r"-?\d{1,9}")


def take_choices(fields: Fields) -> dict[str, str]:
    """Return the choices of a record by letter; empty for none. Raises SampleError.

    They are a list, text that holds a list, an object by letters, {"label": [...], "text": [...]}, or columns A, B, C
    and so on.
    """
    name = fields.only(CHOICE_COLUMNS, "choices")
    if name is None:
        if not (fields.has("A") and fields.has("B")):
            return {}
        return {letter: fields.text(letter) for letter in ascii_uppercase if fields.has(letter)}
    value = literal_in(fields.take(name))
    if isinstance(value, str):
        fields.refuse(f"{name!r} is text that holds no list", "give a list of choices")
    if isinstance(value, Mapping) and is_list(value.get("text")) and is_list(value.get("label")):
        value = dict(zip(value["label"], value["text"]))
    if is_list(value):
        if len(value) > len(ascii_uppercase):
            fields.refuse(f"{name!r} has {len(value)} choices, more than letters", "give fewer")
        value = dict(zip(ascii_uppercase, value))
    if not isinstance(value, Mapping):
        fields.refuse(f"{name!r} is {kind_of(value)}", "give a list of choices")
    return {
        str(letter): scalar(fields.record, name, choice) for letter, choice in value.items() if not is_blank(choice)
    }


def answer_among(fields: Fields, choices: Mapping[str, str], name: str, value: Any) -> str:
    """Return the answer to learn: a letter if the record gives a choice's number (counted from 0), else the text as
    written. Raises SampleError for a number that no choice has."""
    if is_list(value):
        fields.refuse(f"{name!r} holds {len(value)} answers to one question with choices", "give one")
    text = scalar(fields.record, name, value).strip()
    texts = list(choices.values())
    number = text.removesuffix(".0") if isinstance(value, float) else text
    if text in choices or not _NUMBER.fullmatch(number) or (isinstance(value, str) and text in texts):
        return text
    if not 0 <= int(number) < len(texts):
        fields.refuse(
            f"{name!r} is {number}, but there are {len(texts)} choices, counted from 0",
            "give the number or the letter of a choice",
        )
    if number in texts and texts[int(number)] != number:
        fields.refuse(
            f"{name!r} is {number}, which is the text of one choice and the number of another", "give its letter"
        )
    return list(choices)[int(number)]


SYSTEM_COLUMNS = ("system", "system_prompt")
CONTEXT_COLUMNS = ("context", "hint")
"""Columns of text that precedes a question."""
DESIRED_COLUMNS = ("label", "kto_tag")
"""Columns that mark an answer as good or bad (KTO)."""
GROUNDING_MARKERS = ("<bbox>", "<ref-object>")
_FILE_IN_TAGS = re.compile(r"<(img|audio|video)>([^<>\n]{1,1024})</\1>")
"""A media file inside a text, as the first Qwen-VL and Qwen-Audio have it."""
MOST_CHARACTERS = 16 << 20
"""Characters of the texts of one sample: more than any model reads at once."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Runs of records that cost no more to read together than one record, such as blocks of Parquet rows.

    lengths: records of each run. window: number of runs that a reader can cache. groups: group of each run, counted
    from 0; the runs of a group can only be read in order. Empty: each run is a group of its own.
    """

    lengths: tuple[int, ...]
    window: int
    groups: tuple[int, ...] = ()


def parse_record(
    record: FileRecord, prompt: str | None = None, columns: Mapping[str, str] | None = None, has_marks: bool = False
) -> Sample:
    """Parse a record into a sample.

    prompt: the question to ask if the record has an answer but no question.
    columns: the record's names for `images`, `audios`, `videos`, `question`, `answer`, `messages` and the like.
    has_marks: answers are marked as good or bad, so a mark alone is no answer.
    Raises SampleError naming the record and the columns that it has.
    """
    fields = Fields(record, columns or {})
    if is_preference(fields):
        return _preference(fields, prompt)
    listed = ListedMedia(fields)
    chat = fields.only(CHAT_COLUMNS, "the conversation")
    if chat is not None:
        turns = parse_turns(fields, fields.take(chat), listed)
    elif fields.has("texts"):
        chat = "texts"
        turns = parse_pairs(fields, chat, listed)
    elif is_objects(fields.peek("prompt")) and fields.has("prompt") and fields.has("completion"):
        chat = "prompt"
        turns = parse_turns(fields, fields.take(chat), listed)
        completion = fields.take("completion")
        turns += (
            (Turn("assistant", (completion,)),)
            if isinstance(completion, str)
            else parse_turns(fields, completion, listed)
        )
    else:
        turns = _question_and_answer(fields, prompt, listed, has_marks)
    tools = ""
    if chat is not None:
        tools = _tools(fields)
        _refuse_second_meaning(fields, chat, turns)
    _refuse_other_answers(fields, turns)
    return _sample(fields, turns, listed, tools)


def parse_prompt(record: FileRecord) -> Sample:
    """Parse a record into a sample that may end with a question. Raises SampleError like `parse_record`."""
    fields = Fields(record, {})
    others = (*CHAT_COLUMNS, "texts", *ANSWER_COLUMNS, *OTHER_ANSWER_COLUMNS)
    question = next((name for name in QUESTION_COLUMNS if fields.has(name)), None)
    if question is None or any(map(fields.has, others)) or is_objects(fields.peek(question)):
        return parse_record(record)
    listed = ListedMedia(fields)
    question = _question(fields, None, take_choices(fields))
    return _sample(fields, (*_history(fields, listed), Turn("user", (question or "",))), listed)


def _sample(fields: Fields, turns: tuple[Turn, ...], listed: ListedMedia, tools: str = "") -> Sample:
    record = fields.record
    system = fields.only(SYSTEM_COLUMNS, "the system text")
    if system is not None and turns:
        text = fields.peek(system)
        if not isinstance(text, str):
            fields.refuse(f"{system!r} is {kind_of(text)}", "give text")
        if turns[0].role != "system":
            turns = (Turn("system", (text,)), *turns)
        elif turns[0].content != (text,):
            fields.refuse(f"has a system text in {system!r} and another in its conversation", "keep one of them")
    if not turns:
        raise SampleError(record.id, "the conversation is empty", "remove the record")
    turns = listed.placed(turns)
    characters = sum(len(part) for turn in turns for part in turn.content if isinstance(part, str))
    if characters > MOST_CHARACTERS:
        fields.refuse(
            f"has {characters:,} characters of text, more than the {MOST_CHARACTERS:,} allowed", "cut it into pieces"
        )
    desired = _mark(fields)
    return Sample(record.id, turns, tuple(listed), tools, fields.unused(), desired=desired)


def _mark(fields: Fields) -> bool | None:
    """Return the mark of a record's answer as good or bad; None without one. Raises SampleError for unlike marks."""
    found: dict[str, bool] = {}
    for name in DESIRED_COLUMNS:
        mark = _mark_in(fields.peek(name))
        if mark is not None and (fields.is_named(name) or name in fields.unused()):
            fields.take(name)
            found[name] = mark
    if len({*found.values()}) == 2:
        fields.refuse(f"is marked one way in {' and otherwise in '.join(map(repr, found))}", "remove one of these")
    return next(iter(found.values()), None)


def _mark_in(value: Any) -> bool | None:
    """Return a truth value, which CSV holds as text; None for any other value."""
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _preference(fields: Fields, prompt: str | None) -> Sample:
    """Parse a record with a chosen and a rejected answer. Raises SampleError."""
    listed, again = ListedMedia(fields), ListedMedia(fields)
    asked: tuple[Turn, ...] = ()
    if not is_objects(fields.peek("prompt")) and not any(map(fields.has, CHAT_COLUMNS)):
        question = _question(fields, prompt, take_choices(fields))
        if question is not None or listed:
            asked = (*_history(fields, listed), Turn("user", (question,) if question else ()))
    chosen, rejected = parse_pair(fields, asked, listed, again)
    tools = _tools(fields)
    _refuse_other_answers(fields, (*chosen, *rejected))
    worse = _sample(fields, rejected, again, tools)
    better = _sample(fields, chosen, listed, tools)
    if worse.unplaced != better.unplaced:
        fields.refuse("its two conversations hold unlike media", "give media in the prompt, once")
    return replace(better, rejected=worse.turns, desired=worse.desired)


def _tools(fields: Fields) -> str:
    """Return the tools of a conversation, which OpenAI's earlier form calls functions. Raises SampleError."""
    name = fields.only(("tools", "functions"), "the tools")
    return "" if name is None else parse_tools(fields.record.id, fields.take(name))


def _refuse_other_answers(fields: Fields, turns: tuple[Turn, ...]) -> None:
    """Raise SampleError for answers that must not be learned as they are: texts with ms-swift's markers for `objects`,
    which each model writes in its own format, and with files in tags."""
    texts = [part for turn in turns for part in turn.content if isinstance(part, str)]
    marker = next((mark for mark in GROUNDING_MARKERS if any(mark in text for text in texts)), None)
    if fields.has("objects") and marker is not None:
        fields.refuse(
            f"{marker} in its text stands for what 'objects' lists (grounding), which is not filled in here",
            "write names and boxes into the text, in the form that the model knows",
        )
    for text in texts:
        for tag, name in _FILE_IN_TAGS.findall(text):
            if kind_of_name(name) == (kind := "image" if tag == "img" else tag):
                fields.refuse(
                    f"its text names the file {name!r} in <{tag}> tags, and would be learned without the {kind}",
                    f"list the file in '{kind}s', and write <{kind}> where it belongs",
                )


def _refuse_second_meaning(fields: Fields, chat: str, turns: tuple[Turn, ...]) -> None:
    """Raise SampleError if a record is a conversation and also has a question or an answer that repeats no turn."""
    if fields.names_conversation:
        return
    texts = [part for turn in turns for part in turn.content if isinstance(part, str)]
    used = {chat, "completion"} if chat == "prompt" else {chat}
    for name in (*CHAT_COLUMNS, "texts", *QUESTION_COLUMNS, "input", "history", *ANSWER_COLUMNS):
        if not fields.has(name) or name in used or name not in fields.unused():
            continue
        value = fields.take(name)
        if not (isinstance(value, str) and any(value in text for text in texts)):
            fields.refuse(
                f"is a conversation in {chat!r}, and has {name!r} besides",
                f"name the one to use with 'columns' of the data source, for example {{messages: {chat}}}",
            )


def _question_and_answer(fields: Fields, prompt: str | None, listed: ListedMedia, has_marks: bool) -> tuple[Turn, ...]:
    has_media = bool(listed)
    answer = fields.only(ANSWER_COLUMNS, "the answer") or fields.only(OTHER_ANSWER_COLUMNS, "the answer")
    if answer is None:
        answer = _without_answer(fields)
    lacks_answer = has_marks or any(map(fields.knows, ANSWER_COLUMNS))
    if lacks_answer and answer in DESIRED_COLUMNS and _mark_in(fields.peek(answer)) is not None:
        fields.refuse(f"{answer!r} marks an answer, and there is none", "give it in 'completion'")
    choices = take_choices(fields)
    question = _question(fields, prompt, choices)
    value = fields.take(answer)
    if is_list(value) and len(value) == 1:
        value = value[0]
    if choices:
        answer_text = answer_among(fields, choices, answer, value)
    elif is_list(value):
        fields.mark_unused(f"{answer}[1:]")
        answer_text = scalar(fields.record, answer, value[0])
    else:
        answer_text = scalar(fields.record, answer, value)
    turns = _history(fields, listed)
    reply = Turn("assistant", (answer_text,))
    if question is None and not has_media and not turns:
        return (reply,)
    return (*turns, Turn("user", (question,) if question else ()), reply)


def _without_answer(fields: Fields) -> str:
    """Return the answer column that is an empty text. Raises SampleError if there is none."""
    there = filter(fields.knows, (*ANSWER_COLUMNS, *OTHER_ANSWER_COLUMNS, *CHAT_COLUMNS, "texts"))
    blank = {name: fields.peek(name) for name in there}
    for name, value in blank.items():
        if value == "" and name not in CHAT_COLUMNS:
            return name
    for name, value in blank.items():
        if value is not None and name in (*CHAT_COLUMNS, "texts"):
            fields.refuse("the conversation is empty", "remove the record")
        fields.refuse(f"{name!r} is {'null' if value is None else 'empty'}", "fill it in, or remove the record")
    fields.refuse(
        f"is of no known form; found the fields {', '.join(sorted(fields.record.fields)) or '(none)'}",
        "give 'messages', 'conversations', 'texts', or a question and an answer (name yours with 'columns')",
    )


def _question(fields: Fields, prompt: str | None, choices: Mapping[str, str]) -> str | None:
    """Return a question's text: context and hint, question and input, and choices, a line each; None for no text."""
    name = fields.only(QUESTION_COLUMNS, "the question")
    question = prompt
    if name is not None:
        question = fields.text(name)
    elif any(fields.peek(column) == "" for column in QUESTION_COLUMNS):
        question = prompt or ""
    if fields.has("input"):
        if name in ("question", "query") and not (fields.is_named("question") or fields.is_named("input")):
            fields.refuse(
                f"has two columns for the question, {name!r} and 'input'",
                "name the one to use with 'columns' of the data source",
            )
        question = fields.text("input") if name is None else f"{question}\n{fields.text('input')}"
    if question is None and not choices:
        return None
    before = [
        fields.text(column) for column in CONTEXT_COLUMNS if isinstance(fields.peek(column), str) and fields.has(column)
    ]
    lines = (*before, question, *(f"{letter}. {choice}" for letter, choice in choices.items()))
    return "\n".join(line for line in lines if line)


def _history(fields: Fields, listed: ListedMedia) -> tuple[Turn, ...]:
    """Return the turns before the question, which `history` holds as pairs or messages."""
    return parse_pairs(fields, "history", listed) if fields.has("history") else ()
