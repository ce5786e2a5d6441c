"""Multiple-choice questions: parse the choices by letter, and the answer."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from string import ascii_uppercase
from typing import Any

from dilatant.data.readers.record_fields import Fields, is_blank, is_list, kind_of, scalar

CHOICE_COLUMNS = ("options", "choices")


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
    value = fields.take(name)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
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
        str(letter): scalar(fields.record, name, choice)
        for letter, choice in value.items()
        if not is_blank(choice)
    }


def choices_text(choices: Mapping[str, str]) -> str:
    """Format the choices for the text of a question: one line each, with its letter."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in choices.items())


def answer_among(fields: Fields, choices: Mapping[str, str], name: str, value: Any) -> str:
    """Return the answer to learn: a letter if the record gives a choice's number (counted from 0), else the text as
    written. Raises SampleError for a number that no choice has."""
    if is_list(value):
        fields.refuse(f"{name!r} holds {len(value)} answers to one question with choices", "give one")
    text = scalar(fields.record, name, value).strip()
    texts = list(choices.values())
    number = text.removesuffix(".0") if isinstance(value, float) else text
    if text in choices or not number.isdecimal() or (isinstance(value, str) and text in texts):
        return text
    if int(number) >= len(texts):
        fields.refuse(
            f"{name!r} is {number}, but there are {len(texts)} choices, counted from 0",
            "give the number or the letter of a choice",
        )
    if number in texts and texts[int(number)] != number:
        fields.refuse(
            f"{name!r} is {number}, which is the text of one choice and the number of another",
            "give its letter",
        )
    return list(choices)[int(number)]
