"""Encoding settings: the chat template, and the media units and generators of a model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from dilatant.config.model import LANGUAGE
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.media_units.unit_base import PiecedClipUnit
from dilatant.data.sample import MediaKind, MediaMarkup, MediaUnit, Role, Sample, Turn
from dilatant.data.text.chat import ChatTokenizer

NO_LOSS = -100
TOKENS = "tokens"
"""Part of a sample: ids and labels. The other parts are the media units, by name."""
QUESTION = "question"
"""Like `TOKENS`, but with labels on the last answer only, for the evaluation of held-out samples."""
ESCAPE = "\\"
"""Precedes a marker that is an ordinary word of the text."""


def grid_part(unit: str) -> str:
    """Return the name of the part that holds the sizes of a unit's items, without the items."""
    return f"{unit}.grid"


@dataclass(frozen=True)
class Encoding:
    """Everything that `encode_sample` needs besides the sample. Picklable.

    targets: how images in an assistant's turns are generated. max_length: maximum tokens of a sample in the language
    model, media included. held_out: samples are scored by their last answers, so a sample without a question is an
    error. truncates: training samples are cut at `max_length`. pairs: samples are pairs of answers, or have marked
    answers beside others' (marks); shares_prompt: both answers of a pair follow one copy of their prompt. system: the
    system text of conversations without one.
    """

    chat: ChatTokenizer
    units: Sequence[MediaUnit] = ()
    train_on: Literal["assistant", "all"] = "assistant"
    max_length: int | None = None
    held_out: bool = False
    targets: Sequence[ImageTarget] = ()
    truncates: bool = False
    pairs: bool = False
    marks: bool = False
    shares_prompt: bool = True
    system: str | None = None

    @property
    def fingerprint(self) -> str:
        """Changes if the sizes or refusals of any sample may change."""
        parts = (
            self.chat.fingerprint,
            [unit.fingerprint for unit in self.units],
            self.train_on,
            self.held_out,
            [target.fingerprint for target in self.targets],
            *((self.max_length,) if self.cuts_at else ()),
            *(("pairs", self.shares_prompt) if self.pairs else ()),
            *(("marks",) if self.marks else ()),
            *(() if self.system is None else (self.system,)),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def cuts_at(self) -> int | None:
        """The number of tokens at which samples are cut; None for no cut."""
        return self.max_length if self.truncates and not self.held_out else None

    @property
    def unit_names(self) -> tuple[str, ...]:
        """The columns of sizes: the language model, then encoders and generators."""
        # An encoder of images and clips has two media units of one name.
        names = [unit.name for unit in self.units] + [target.name for target in self.targets]
        return (LANGUAGE, *dict.fromkeys(names))

    @cached_property
    def around(self) -> dict[tuple[str, MediaKind], tuple[str, str]]:
        """Map unit and kind → the texts before and after its items, by the chat template and by the model's processor.
        A clip's pieces include the latter themselves."""
        found: dict[tuple[str, MediaKind], tuple[str, str]] = {}
        for unit in self.units:
            written = unit.written or MediaMarkup(unit.marker)
            before, after = self.chat.template.around_media(unit.kind, written.token)
            opens, closes = ("", "") if isinstance(unit, PiecedClipUnit) else (written.opens, written.closes)
            found[unit.name, unit.kind] = before + opens, closes + after
        return found

    def turns_of(self, sample: Sample) -> tuple[Turn, ...]:
        """Return the turns of a sample, behind `system` if there is a question and no system text."""
        roles = {turn.role for turn in sample.turns}
        if self.system is None or "system" in roles or "user" not in roles:
            return sample.turns
        return (Turn("system", (self.system,)), *sample.turns)

    def units_in(self, role: Role) -> Sequence[MediaUnit]:
        """Return the units for media in a turn of this role, in order of preference."""
        return (*self.targets, *self.units) if role == "assistant" else self.units

    @cached_property
    def markers(self) -> Mapping[Role, tuple[re.Pattern[str], Mapping[str, MediaUnit]]]:
        """Role → the pattern that finds markers of media in a text, escaped ones with their `ESCAPE`, longest first;
        and the unit of each marker."""
        found: dict[Role, tuple[re.Pattern[str], Mapping[str, MediaUnit]]] = {}
        for role in get_args(Role):
            unit_of = {unit.marker: unit for unit in reversed(self.units_in(role))}
            either = "|".join(map(re.escape, sorted(unit_of, key=len, reverse=True))) or "(?!)"  # which finds nothing
            found[role] = re.compile(f"{re.escape(ESCAPE)}?(?:{either})"), unit_of
        return found
