"""How samples become tokens: the chat template, and the units that see and draw."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from dilatant.config.model import LANGUAGE
from dilatant.data.media_units.framed_clip_unit import FramedClipUnit
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.media_units.native_clip_unit import NativeClipUnit
from dilatant.data.sample import (
    MediaKind,
    MediaUnit,
    Role,
    Written,
)
from dilatant.data.text.chat import ChatTokenizer

NO_LOSS = -100
TOKENS = "tokens"
"""The part of a sample that is its ids and labels; its other parts are the media units by their names."""
QUESTION = "question"
"""As `TOKENS`, but labels are those of the last answer alone, by which a held-out sample is judged."""
IN_PIECES = NativeClipUnit | FramedClipUnit
"""Units whose items are written in several places, with text between."""
Unit = MediaUnit | ImageTarget
"""What a media item is for the model: an input of an encoder, or a target of a generator."""


ESCAPE = "\\"
"""Stands before a marker that is a word of the text."""


def grid_part(unit: str) -> str:
    """The part of a sample that is the sizes of a unit's items, without the items."""
    return f"{unit}.grid"


@dataclass(frozen=True)
class Encoding:
    """How samples become tokens: everything `encode_sample` needs besides the sample. Picklable.

    targets: what images in an assistant's turns are, where the model draws. max_length: most tokens of a sample in the
    language model, media included. held_out: samples are judged by their
    last answers, so each that has no question is a problem. truncates: samples to train on are cut off there.
    """

    chat: ChatTokenizer
    units: Sequence[MediaUnit] = ()
    train_on: Literal["assistant", "all"] = "assistant"
    max_length: int | None = None
    held_out: bool = False
    targets: Sequence[ImageTarget] = ()
    truncates: bool = False

    @property
    def fingerprint(self) -> str:
        """Changes when the sizes or refusals of any sample may."""
        parts = (
            self.chat.fingerprint,
            [unit.fingerprint for unit in self.units],
            self.train_on,
            self.held_out,
            [target.fingerprint for target in self.targets],
            *((self.max_length,) if self.cuts_at else ()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def cuts_at(self) -> int | None:
        """Tokens behind which a sample is cut off; None where none is."""
        return self.max_length if self.truncates and not self.held_out else None

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The columns of sizes: the language model, then encoders and generators."""
        # A unit that sees images and clips has two ways to see.
        names = [unit.name for unit in self.units] + [target.name for target in self.targets]
        return (LANGUAGE, *dict.fromkeys(names))

    @cached_property
    def around(self) -> dict[tuple[str, MediaKind], tuple[str, str]]:
        """Unit and kind → what is written before and after its items: by the chat template, and by the model's
        processor; a clip says the latter itself, piece by piece."""
        found: dict[tuple[str, MediaKind], tuple[str, str]] = {}
        for unit in self.units:
            written = unit.written or Written(unit.marker)
            before, after = self.chat.template.around_media(unit.kind, written.token)
            opens, closes = ("", "") if isinstance(unit, IN_PIECES) else (written.opens, written.closes)
            found[unit.name, unit.kind] = before + opens, closes + after
        return found

    def units_in(self, role: Role) -> Sequence[Unit]:
        """What media in a turn of this role may be, those that come first first."""
        return (*self.targets, *self.units) if role == "assistant" else self.units

    @cached_property
    def markers(self) -> Mapping[Role, tuple[re.Pattern[str], Mapping[str, Unit]] | None]:
        """By role, what finds the markers of media in a text, escaped ones with their `ESCAPE`, the longest first, and
        whose they are."""
        found: dict[Role, tuple[re.Pattern[str], Mapping[str, Unit]] | None] = {}
        for role in get_args(Role):
            unit_of = {unit.marker: unit for unit in reversed(self.units_in(role))}
            longest_first = sorted(unit_of, key=len, reverse=True)
            either = "|".join(map(re.escape, longest_first))
            pattern = re.compile(f"{re.escape(ESCAPE)}?(?:{either})") if unit_of else None
            found[role] = None if pattern is None else (pattern, unit_of)
        return found
