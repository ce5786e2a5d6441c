"""Media placement: the positions of a sample's media in its text, and the unit of each."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

from dilatant.data.errors import MediaError, SampleError
from dilatant.data.media.media_header import media_size
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.sample import (
    Media,
    MediaKind,
    MediaUnit,
    Sample,
)
from dilatant.data.text.chat import BREAK, MEDIA, RESERVED
from dilatant.data.text.chat_template import TemplateMessage
from dilatant.data.text.encoding import ESCAPE, IN_PIECES, Encoding, EncodingUnit


@dataclass(frozen=True, slots=True)
class ClipTokens:
    """A run of a clip's tokens without text between; all encoder tokens of the clip belong to the first piece."""

    tokens: int
    is_first: bool


@contextmanager
def name_item_in_errors(sample: Sample, media: Media) -> Iterator[None]:
    """Context manager that converts errors of an item's header or size to SampleError."""
    try:
        yield
    except MediaError as error:
        raise error.of(sample.id) from None
    except ValueError as error:
        raise SampleError(
            sample.id, f"{media.kind} {media.name!r}: {error}", "replace the file or remove the sample"
        ) from None


@dataclass(frozen=True, slots=True)
class MarkerRules:
    """Rules for markers that are words of a text. listed: kinds of media that the sample lists outside its text; their
    markers are not words. tokens: tokens of the tokenizer, which a word must not become."""

    listed: frozenset[MediaKind]
    tokens: frozenset[str]

    def word(self, written: str, marker: str) -> str:
        """Return the text for `written`, which ends with `marker`."""
        before = written[: -len(marker)]
        return f"{before}{marker[0]}{BREAK}{marker[1:]}" if marker in self.tokens else written


PlacedMedia = list[tuple[Media, EncodingUnit] | tuple[Media, EncodingUnit, ClipTokens]]


def place_media(sample: Sample, encoding: Encoding) -> tuple[list[TemplateMessage], PlacedMedia, PlacedMedia]:
    """Return messages with a `MEDIA` character for every item, those items in order, and the items that precede all
    text.

    Markers in the text take the unplaced media of their unit's kind, in order. A marker is a word if a backslash
    precedes it or the sample lists no media of its kind. Media of a kind without markers precede the first user turn.
    With a generator, images in an assistant's turn are targets; if another turn follows, the encoder reads them, too.
    """
    waiting: dict[MediaKind, deque[Media]] = {kind: deque() for kind in get_args(MediaKind)}
    for media in sample.unplaced:
        waiting[media.kind].append(media)
    listed = frozenset(media.kind for media in sample.unplaced)
    marked: set[MediaKind] = set()
    for turn in sample.turns:
        if (found := encoding.markers[turn.role]) is not None and listed:
            pattern, unit_of = found
            written = (
                match.group()
                for part in turn.content
                if isinstance(part, str)
                for match in pattern.finditer(part)
            )
            marked.update(unit_of[marker].kind for marker in written if marker in unit_of)
    read_by: dict[MediaKind, MediaUnit] = {}
    for unit in encoding.units:
        read_by.setdefault(unit.kind, unit)
    drawn_by: dict[MediaKind, ImageTarget] = {}
    for target in encoding.targets:
        drawn_by.setdefault(target.kind, target)
    leading = tuple(media for media in sample.unplaced if media.kind not in marked)
    words = MarkerRules(listed, encoding.chat.added)
    for media in leading:
        waiting[media.kind].popleft()
    given = {kind: len(media) for kind, media in waiting.items()}
    used = dict.fromkeys(waiting, 0)
    first_user = next((at for at, turn in enumerate(sample.turns) if turn.role == "user"), 0)

    messages: list[TemplateMessage] = []
    placed: PlacedMedia = []
    prepended: PlacedMedia = []

    def put(media: Media, unit: EncodingUnit | None) -> str:
        if unit is None:
            remedy = "add one under 'model.encoders'"
            if media.kind == "video":
                remedy = "give frames as images, or a whole model that sees clips"
            if media.kind == "image":
                remedy += ", or a generator that draws what stands in an assistant's turn"
            raise SampleError(
                sample.id,
                f"holds the {media.kind} {media.name!r}, but the model has no {media.kind} encoder",
                remedy,
            )
        if isinstance(unit, ImageTarget):
            placed.append((media, unit))
            drawn = f"{unit.start}{MEDIA}"
            reader = read_by.get(media.kind) if is_followed else None
            return drawn if reader is None or reader.merge == "prepend" else drawn + put(media, reader)
        before, after = encoding.around[unit.name, unit.kind]
        if isinstance(unit, IN_PIECES):
            with name_item_in_errors(sample, media):
                pieces = unit.pieces(media_size(media))
            placed.extend(
                (media, unit, ClipTokens(tokens, number == 0)) for number, (_, tokens, _) in enumerate(pieces)
            )
            return before + "".join(f"{opens}{MEDIA}{closes}" for opens, _, closes in pieces) + after
        (prepended if unit.merge == "prepend" else placed).append((media, unit))
        return "" if unit.merge == "prepend" else f"{before}{MEDIA}{after}"

    is_followed = True
    for position, turn in enumerate(sample.turns):
        is_followed = position + 1 < len(sample.turns)
        content = (*leading, *turn.content) if position == first_user else turn.content
        text = []
        for part in content:
            if isinstance(part, Media):
                drawn = drawn_by.get(part.kind) if turn.role == "assistant" and part not in leading else None
                text.append(put(part, drawn or read_by.get(part.kind)))
                continue
            if reserved := RESERVED.search(part):
                code = ord(reserved.group())
                kind = "half a character" if code < 0xE000 else "a private character that is used internally"
                raise SampleError(sample.id, f"the text holds U+{code:X}, {kind}", "remove it")
            text.append(_fill_markers(part, encoding.markers[turn.role], words, waiting, used, put))
        messages.append(TemplateMessage(turn.role, "".join(text), turn.extras, turn.carries_loss))
    problems = [
        f"{used[kind]} {kind} markers in the text for {given[kind]} {kind}s beside it"
        for kind in waiting
        if used[kind] != given[kind]
    ]
    if problems:
        raise SampleError(
            sample.id,
            ", ".join(problems),
            "write one marker for each item, or none at all to put them first; a backslash before a marker makes it a "
            "word of the text",
        )
    order = {unit.name: at for at, unit in enumerate(encoding.units)}
    prepended.sort(key=lambda item: order[item[1].name])
    return messages, placed, prepended


def _fill_markers(
    text: str,
    markers: tuple[re.Pattern[str], Mapping[str, EncodingUnit]] | None,
    words: MarkerRules,
    waiting: Mapping[MediaKind, deque[Media]],
    used: dict[MediaKind, int],
    put: Callable[[Media, EncodingUnit], str],
) -> str:
    if markers is None:
        return text
    pattern, unit_of = markers

    def fill(match: re.Match[str]) -> str:
        marker = match.group().removeprefix(ESCAPE)
        unit = unit_of[marker]
        if unit.kind not in words.listed:
            return words.word(match.group(), marker)
        if match.group() != marker:
            return words.word(marker, marker)
        used[unit.kind] += 1
        return put(waiting[unit.kind].popleft(), unit) if waiting[unit.kind] else ""

    return pattern.sub(fill, text)
