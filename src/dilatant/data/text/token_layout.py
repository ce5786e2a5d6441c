"""Token layout: token ids of a sample with every media item expanded, computed from sizes alone."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from dilatant.data.sample import Media, MediaKind, MediaSize, MediaUnit, Sample
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
    waiting: dict[MediaKind, deque[Media]] = {kind: deque() for kind in get_args(MediaKind)}
    for media in sample.unplaced:
        waiting[media.kind].append(media)
    listed = frozenset(media.kind for media in sample.unplaced)
    marked: set[MediaKind] = set()
    for turn in turns:
        if (found := encoding.markers[turn.role]) is not None and listed:
            pattern, unit_of = found
            written = (
                match.group() for part in turn.content if isinstance(part, str) for match in pattern.finditer(part)
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
    first_user = next((at for at, turn in enumerate(turns) if turn.role == "user"), 0)

    messages: list[TemplateMessage] = []
    placed: list[PlacedMedia] = []
    prepended: list[PlacedMedia] = []

    def put(media: Media, unit: MediaUnit | None) -> str:
        if unit is None:
            remedy = "add one under 'model.encoders'"
            if media.kind == "video":
                remedy = "give frames as images, or a whole model that sees clips"
            if media.kind == "image":
                remedy += ", or a generator that draws what stands in an assistant's turn"
            raise SampleError(
                sample.id, f"holds the {media.kind} {media.name!r}, but the model has no {media.kind} encoder", remedy
            )
        if isinstance(unit, ImageTarget):
            placed.append(PlacedMedia(media, unit))
            drawn = f"{unit.start}{MEDIA}"
            reader = read_by.get(media.kind) if is_followed else None
            return drawn if reader is None or reader.merge == "prepend" else drawn + put(media, reader)
        before, after = encoding.around[unit.name, unit.kind]
        if isinstance(unit, PiecedClipUnit):
            with name_item_in_errors(sample, media):
                size = media_size(media)
                pieces = unit.pieces(size)
            placed.extend(
                PlacedMedia(media, unit, tokens, None if at else size) for at, (_, tokens, _) in enumerate(pieces)
            )
            return before + "".join(f"{opens}{MEDIA}{closes}" for opens, _, closes in pieces) + after
        (prepended if unit.merge == "prepend" else placed).append(PlacedMedia(media, unit))
        return "" if unit.merge == "prepend" else f"{before}{MEDIA}{after}"

    is_followed = True
    for position, turn in enumerate(turns):
        is_followed = position + 1 < len(turns)
        content = (*leading, *turn.content) if position == first_user else turn.content
        text = []
        for part in content:
            if isinstance(part, Media):
                drawn = drawn_by.get(part.kind) if turn.role == "assistant" and part not in leading else None
                text.append(put(part, drawn or read_by.get(part.kind)))
                continue
            _refuse_reserved(sample, part)
            text.append(_fill_markers(part, encoding.markers[turn.role], words, waiting, used, put))
        for key, value in turn.extras:
            if encoding.chat.template.reads(key):
                _refuse_reserved(sample, value, is_json=True)
        messages.append(TemplateMessage(turn.role, "".join(text), turn.extras, turn.carries_loss))
    _refuse_reserved(sample, sample.tools, is_json=True)
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
    prepended.sort(key=lambda item: order[item.unit.name])
    return messages, placed, prepended


def _refuse_reserved(sample: Sample, text: str, is_json: bool = False) -> None:
    """Raise SampleError for a text that holds a character of `RESERVED`. is_json: it may be escaped."""
    if is_json and "\\u" in text:
        text = json.dumps(json.loads(text), ensure_ascii=False)
    if reserved := RESERVED.search(text):
        code = ord(reserved.group())
        kind = "half a character" if code < 0xE000 else "a private character that is used internally"
        raise SampleError(sample.id, f"the text holds U+{code:X}, {kind}", "remove it")


def _fill_markers(
    text: str,
    markers: tuple[re.Pattern[str], Mapping[str, MediaUnit]] | None,
    words: MarkerRules,
    waiting: Mapping[MediaKind, deque[Media]],
    used: dict[MediaKind, int],
    put: Callable[[Media, MediaUnit], str],
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


def _lay_out_pair(sample: Sample, encoding: Encoding) -> TokenLayout:
    """Lay out both answers of a pair, behind the tokens that their prompts share or, without such, as two sequences.

    Each answer keeps a copy of the prompt's last token, because its hidden state predicts two first tokens.
    """
    chosen, rejected = both = [
        _lay_out_turns(replace(sample, turns=turns, rejected=()), encoding, for_generation=False)
        for turns in (sample.turns, sample.rejected)
    ]
    if np.array_equal(chosen.ids, rejected.ids):
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
