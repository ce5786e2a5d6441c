"""Token layout: token ids of a sample with every media item expanded, computed from sizes alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.errors import MediaError, SampleError
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.image_target import ImageTarget
from dilatant.data.media_units.unit_base import PiecedClipUnit
from dilatant.data.sample import Media, MediaKind, MediaSize, MediaUnit, Sample, Turn
from dilatant.data.text.chat import BREAK, MEDIA, RESERVED
from dilatant.data.text.chat_template import TemplateMessage
from dilatant.data.text.encoding import ESCAPE, NO_LOSS, Encoding


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """A media item with its unit. tokens: those of one piece of a clip, which has text between its pieces; None for an
    item in one place. size: where it was read for the pieces, of the first one, which has all encoder tokens."""

    media: Media
    unit: MediaUnit
    tokens: int | None = None
    size: MediaSize | None = None


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


def place_media(
    sample: Sample, encoding: Encoding
) -> tuple[list[TemplateMessage], list[PlacedMedia], list[PlacedMedia]]:
    """Return messages with a `MEDIA` character for every item, those items in order, and the items that precede all
    text.

    Markers in the text take the unplaced media of their unit's kind, in order. A marker is a word if a backslash
    precedes it or the sample lists no media of its kind. Media of a kind without markers precede the first user turn.
    With a generator, images in an assistant's turn are targets; if another turn follows, the encoder reads them, too.
    """
    turns = encoding.turns_of(sample)
    marked: set[MediaKind] = set()
    for turn in turns if sample.unplaced else ():
        pattern, unit_of = encoding.markers[turn.role]
        written = (match.group() for part in turn.content if isinstance(part, str) for match in pattern.finditer(part))
        marked.update(unit_of[marker].kind for marker in written if marker in unit_of)
    placement = _Placement(sample, encoding, marked)
    leading = [media for media in sample.unplaced if media.kind not in marked]
    first_user = next((at for at, turn in enumerate(turns) if turn.role == "user"), 0)
    messages = [
        placement.message(turn, leading if position == first_user else [], position + 1 < len(turns))
        for position, turn in enumerate(turns)
    ]
    _refuse_reserved(sample, sample.tools, is_json=True)
    placement.check_markers()
    order = {unit.name: at for at, unit in enumerate(encoding.units)}
    return messages, placement.placed, sorted(placement.prepended, key=lambda item: order[item.unit.name])


class _Placement:
    """Write the turns of a sample, and note the media in them: `placed` in the order of the text, and `prepended`.
    marked: kinds of unplaced media whose places are markers in the text."""

    def __init__(self, sample: Sample, encoding: Encoding, marked: set[MediaKind]) -> None:
        self._sample, self._encoding = sample, encoding
        self._listed = {media.kind for media in sample.unplaced}
        self._given: dict[MediaKind, list[Media]] = {
            kind: [media for media in sample.unplaced if media.kind == kind]
            for kind in get_args(MediaKind)
            if kind in marked
        }
        self._used = dict.fromkeys(self._given, 0)
        # Of several units for one kind, the first.
        self._read_by: dict[MediaKind, MediaUnit] = {unit.kind: unit for unit in reversed(encoding.units)}
        self._drawn_by: dict[MediaKind, MediaUnit] = {target.kind: target for target in reversed(encoding.targets)}
        self.placed: list[PlacedMedia] = []
        self.prepended: list[PlacedMedia] = []

    def message(self, turn: Turn, leading: Sequence[Media], is_followed: bool) -> TemplateMessage:
        """Write a turn with `leading` media at its start. Raises SampleError."""
        text = [self._media(media, self._read_by.get(media.kind), is_followed) for media in leading]
        for part in turn.content:
            if isinstance(part, Media):
                drawn = self._drawn_by.get(part.kind) if turn.role == "assistant" else None
                text.append(self._media(part, drawn or self._read_by.get(part.kind), is_followed))
                continue
            _refuse_reserved(self._sample, part)
            pattern, unit_of = self._encoding.markers[turn.role]
            fill = partial(self._marker, unit_of, is_followed)
            text.append(pattern.sub(fill, part) if unit_of else part)
        for key, value in turn.extras:
            if self._encoding.chat.template.reads(key):
                _refuse_reserved(self._sample, value, is_json=True)
        return TemplateMessage(turn.role, "".join(text), turn.extras, turn.carries_loss)

    def _marker(self, unit_of: Mapping[str, MediaUnit], is_followed: bool, match: re.Match[str]) -> str:
        """Return the text for a marker: its item, or the marker as a word, which must not become a token."""
        marker = match.group().removeprefix(ESCAPE)
        unit = unit_of[marker]
        if unit.kind in self._listed and match.group() == marker:
            number = self._used[unit.kind]
            self._used[unit.kind] += 1
            media = self._given[unit.kind][number : number + 1]
            return self._media(media[0], unit, is_followed) if media else ""
        before = ESCAPE if unit.kind not in self._listed and match.group() != marker else ""
        return before + (f"{marker[0]}{BREAK}{marker[1:]}" if marker in self._encoding.chat.added else marker)

    def _media(self, media: Media, unit: MediaUnit | None, is_followed: bool) -> str:
        """Return the text for an item, and note the item."""
        if unit is None:
            remedy = "add one under 'model.encoders'"
            if media.kind == "video":
                remedy = "give frames as images, or a whole model that sees clips"
            if media.kind == "image":
                remedy += ", or a generator that draws what stands in an assistant's turn"
            problem = f"holds the {media.kind} {media.name!r}, but the model has no {media.kind} encoder"
            raise SampleError(self._sample.id, problem, remedy)
        if isinstance(unit, ImageTarget):
            self.placed.append(PlacedMedia(media, unit))
            drawn = f"{unit.start}{MEDIA}"
            reader = self._read_by.get(media.kind) if is_followed else None
            is_read = reader is not None and reader.merge != "prepend"
            return drawn + self._media(media, reader, is_followed) if is_read else drawn
        before, after = self._encoding.around[unit.name, unit.kind]
        if isinstance(unit, PiecedClipUnit):
            with name_item_in_errors(self._sample, media):
                size = media_size(media)
                pieces = unit.pieces(size)
            self.placed += [
                PlacedMedia(media, unit, tokens, None if at else size) for at, (_, tokens, _) in enumerate(pieces)
            ]
            return before + "".join(f"{opens}{MEDIA}{closes}" for opens, _, closes in pieces) + after
        (self.prepended if unit.merge == "prepend" else self.placed).append(PlacedMedia(media, unit))
        return "" if unit.merge == "prepend" else f"{before}{MEDIA}{after}"

    def check_markers(self) -> None:
        """Raise SampleError if the turns had more or fewer markers than there are media."""
        problems = [
            f"{used} {kind} markers in the text for {len(self._given[kind])} {kind}s beside it"
            for kind, used in self._used.items()
            if used != len(self._given[kind])
        ]
        if problems:
            raise SampleError(
                self._sample.id,
                ", ".join(problems),
                "write one marker for each item, or none at all to put them first; a backslash before a marker makes "
                "it a word of the text",
            )


def _refuse_reserved(sample: Sample, text: str, is_json: bool = False) -> None:
    """Raise SampleError for a text that holds a character of `RESERVED`. is_json: it may be escaped."""
    if is_json and "\\u" in text:
        text = json.dumps(json.loads(text), ensure_ascii=False)
    if reserved := RESERVED.search(text):
        code = ord(reserved.group())
        kind = "half a character" if code < 0xE000 else "a private character that is used internally"
        raise SampleError(sample.id, f"the text holds U+{code:X}, {kind}", "remove it")


@dataclass(frozen=True, slots=True)
class Item:
    """A media item and its unit, with the item's tokens in that unit and in the language model. size: None for a clip's
    later pieces; its first piece is another item."""

    media: Media
    unit: MediaUnit
    encoder_tokens: int
    merged_tokens: int
    grid: Mapping[str, EncoderInput]
    size: MediaSize | None


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Token ids of a sample and its media items, in order. targets: tokens that carry loss. is_cut: the sample was
    cut. branch: see `EncodedSample`."""

    ids: NDArray[np.int64]
    targets: NDArray[np.bool_]
    items: tuple[Item, ...]
    is_cut: bool = False
    branch: tuple[int, int] | None = None

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.where(self.targets, self.ids, NO_LOSS)

    def sizes(self, encoding: Encoding) -> dict[str, int]:
        sizes = dict.fromkeys(encoding.unit_names, 0)
        sizes[LANGUAGE] = len(self.ids)
        for item in self.items:
            sizes[item.unit.name] += item.encoder_tokens
        return sizes


def lay_out(sample: Sample, encoding: Encoding, for_generation: bool = False) -> TokenLayout:
    """Compute token ids with every media item expanded, from sizes alone. Raises SampleError."""
    refuse_undesired(sample, encoding)
    if encoding.marks and sample.desired is None and not for_generation:
        problem = "has no mark of its answer, and 'method: kto' learns from good and bad ones"
        raise SampleError(sample.id, problem, "give 'label' (or 'kto_tag'), true or false, or remove it")
    if for_generation or not (sample.rejected or encoding.pairs):
        return _lay_out_turns(sample, encoding, for_generation)
    if encoding.pairs and sample.rejected:
        return _lay_out_pair(sample, encoding)
    problem = "has no rejected answer, and 'train.preferences' learns from two"
    remedy = "give 'chosen' and 'rejected', or remove it"
    if sample.rejected:
        problem = "holds preferences, a better and a worse answer, which 'train.preferences' learns from"
        remedy = "set that, or name the answer to learn in 'columns' of the data source: {answer: chosen}"
    raise SampleError(sample.id, problem, remedy)


def refuse_undesired(sample: Sample, encoding: Encoding) -> None:
    """Raise SampleError for an answer that is marked as bad, where marks are not learned from."""
    if sample.desired is False and not encoding.marks:
        raise SampleError(
            sample.id,
            "its answer is marked as undesired (label or kto_tag: false), so it is neither learned nor expected",
            "set 'train.preferences: {method: kto}' to learn from it, remove it, or set 'data.on_error: skip'",
        )


def _lay_out_pair(sample: Sample, encoding: Encoding) -> TokenLayout:
    """Lay out both answers of a pair, behind the tokens that their prompts share or, without such, as two sequences.

    Each answer keeps a copy of the prompt's last token, because its hidden state predicts two first tokens.
    """
    chosen, rejected = both = [
        _lay_out_turns(replace(sample, turns=turns, rejected=()), encoding, for_generation=False)
        for turns in (sample.turns, sample.rejected)
    ]
    if np.array_equal(chosen.ids, rejected.ids) and not encoding.marks:
        raise SampleError(sample.id, "its two answers become the same tokens", "remove it")
    if not (chosen.targets.any() and rejected.targets.any()):
        raise SampleError(sample.id, "has an answer that carries no loss", "remove it")
    shared = 0
    if encoding.shares_prompt:
        shared = max(0, min(int(one.targets.argmax()) for one in both) - 1)
        unlike = np.flatnonzero(chosen.ids[:shared] != rejected.ids[:shared])
        shared = int(unlike[0]) if len(unlike) else shared
        media = [unit.placeholder_id for unit in encoding.units]
        if any(np.isin(one.ids[shared:], media).any() for one in both):
            remedy = "end the prompt with text, or set 'train.preferences.share_prompt: false'"
            raise SampleError(sample.id, "its media are not in the tokens that both answers follow", remedy)
    return TokenLayout(
        np.concatenate([chosen.ids, rejected.ids[shared:]]),
        np.concatenate([chosen.targets, rejected.targets[shared:]]),
        chosen.items if encoding.shares_prompt else (*chosen.items, *rejected.items),
        branch=(shared, len(chosen.ids)),
    )


def _lay_out_turns(sample: Sample, encoding: Encoding, for_generation: bool) -> TokenLayout:
    unheard = [turn.role for turn in sample.turns if turn.role != "assistant" and not turn.carries_loss]
    if unheard and encoding.train_on == "all":
        raise SampleError(
            sample.id,
            f"marks the {unheard[0]}'s turn as not to be learned, but 'data.train_on: all' learns such turns",
            "remove the mark, or set 'data.train_on: assistant'",
        )
    messages, placed, prepended = place_media(sample, encoding)
    try:
        tokens = encoding.chat.tokens(messages, for_generation, sample.tools)
    except UserError as error:
        raise SampleError(sample.id, str(error)) from None
    for target in encoding.targets:
        if bool((tokens.ids == target.placeholder_id).any()):
            raise SampleError(
                sample.id,
                f"the text holds the token by which the model asks {target.name!r} for an image",
                "remove it; an image in an assistant's turn stands for itself",
            )
    together = Counter((each.unit.name, each.unit.kind) for each in (*prepended, *placed))
    items = tuple(_sized(sample, each, together[each.unit.name, each.unit.kind] == 1) for each in (*prepended, *placed))
    front, inside = items[: len(prepended)], items[len(prepended) :]
    targets = (tokens.answered if encoding.train_on == "assistant" else tokens.ids != -1) & ~tokens.silent
    for unit in encoding.units:
        if (tokens.ids == unit.placeholder_id).any():
            raise SampleError(
                sample.id,
                f"its text holds the token that stands for {unit.kind}s ({unit.placeholder_id})",
                f"write {unit.marker!r} where one belongs, or remove it",
            )
    at = np.flatnonzero(tokens.ids == -1)
    if len(at) != len(inside):
        raise SampleError(
            sample.id,
            f"the chat template wrote {len(at)} of {len(inside)} media items",
            "it hides or repeats turns; choose another with 'data.chat_template'",
        )
    repeats = np.ones(len(tokens.ids), np.int64)
    repeats[at] = [item.merged_tokens for item in inside]
    ids = tokens.ids.copy()
    ids[at] = [item.unit.placeholder_id for item in inside]
    lead = [np.full(item.merged_tokens, item.unit.placeholder_id) for item in front]
    ids = np.concatenate([*lead, np.repeat(ids, repeats)]).astype(np.int64)
    targets = np.concatenate([np.zeros(len(ids) - repeats.sum(), bool), np.repeat(targets, repeats)])
    targets[:1] = False  # no token precedes it to predict it
    if for_generation or encoding.cuts_at is None or len(ids) <= encoding.cuts_at:
        return TokenLayout(ids, targets, items)
    return _cut(ids, targets, items, encoding.cuts_at)


def _cut(ids: NDArray[np.int64], targets: NDArray[np.bool_], items: tuple[Item, ...], length: int) -> TokenLayout:
    """Cut to the first `length` tokens, or fewer so that no media item is split."""
    at = kept = 0
    for item in items:
        at += int(np.argmax(ids[at:] == item.unit.placeholder_id))
        if at + item.merged_tokens > length:
            length = min(at, length)
            break
        at += item.merged_tokens
        kept += 1
    return TokenLayout(ids[:length], targets[:length], items[:kept], is_cut=True)


def _sized(sample: Sample, placed: PlacedMedia, alone: bool) -> Item:
    media, unit, tokens = placed.media, placed.unit, placed.tokens
    if tokens is not None and placed.size is None:
        return Item(media, unit, 0, tokens, {}, None)
    with name_item_in_errors(sample, media):
        size = replace(placed.size or media_size(media), alone=alone)
        merged = unit.merged_tokens(size) if tokens is None else tokens
        return Item(media, unit, unit.encoder_tokens(size), merged, unit.grid(size), size)
