"""A sample as a model is fed: token ids with places for media, labels, encoder inputs."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE
from dilatant.data.anyres_image_unit import SHAPES, AnyresImageUnit
from dilatant.data.aspect_image_unit import AspectImageUnit
from dilatant.data.chat import MEDIA, RESERVED, ChatTokenizer
from dilatant.data.chat_template import Message
from dilatant.data.errors import MediaError, SampleError
from dilatant.data.framed_clip_unit import FramedClipUnit
from dilatant.data.image_target import ImageTarget
from dilatant.data.media import media_size
from dilatant.data.native_clip_unit import NativeClipUnit
from dilatant.data.native_image_unit import NativeImageUnit
from dilatant.data.pixels import EncoderInput, joined
from dilatant.data.sample import (
    EncodedSample,
    Media,
    MediaKind,
    MediaUnit,
    Role,
    Sample,
    Written,
    content_digest,
)
from dilatant.data.sound_unit import SoundUnit

NO_LOSS = -100

TOKENS = "tokens"
"""The part of a sample that is its ids and labels; its other parts are the media units by their names."""
QUESTION = "question"
"""As `TOKENS`, but labels are those of the last answer alone, by which a held-out sample is judged."""

_IN_PIECES = NativeClipUnit | FramedClipUnit
_WITH_GRIDS = NativeImageUnit | NativeClipUnit | SoundUnit | AnyresImageUnit | AspectImageUnit
"""Units whose items have unlike sizes, which others ask for without the items."""
Unit = MediaUnit | ImageTarget
"""What a media item is for the model: an input of an encoder, or a target of a generator."""


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
            opens, closes = ("", "") if isinstance(unit, _IN_PIECES) else (written.opens, written.closes)
            found[unit.name, unit.kind] = before + opens, closes + after
        return found

    def units_in(self, role: Role) -> Sequence[Unit]:
        """What media in a turn of this role may be, those that come first first."""
        return (*self.targets, *self.units) if role == "assistant" else self.units

    @cached_property
    def markers(self) -> Mapping[Role, tuple[re.Pattern[str], Mapping[str, Unit]] | None]:
        """By role, what finds the markers of media in a text, the longest first, and whose they are."""
        found: dict[Role, tuple[re.Pattern[str], Mapping[str, Unit]] | None] = {}
        for role in get_args(Role):
            unit_of = {unit.marker: unit for unit in reversed(self.units_in(role))}
            longest_first = sorted(unit_of, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, longest_first))) if unit_of else None
            found[role] = None if pattern is None else (pattern, unit_of)
        return found


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """tokens: unit → tokens it processes, in the order of `Encoding.unit_names`. target_tokens carry loss. content: as
    `EncodedSample.content_digest`. refusals: why it cannot be trained on at any length."""

    tokens: Mapping[str, int]
    target_tokens: int
    content: int
    refusals: tuple[SampleError, ...]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A sample up to where the assistant's last answer starts, and that answer as text."""

    sample: EncodedSample
    answer: str


def encode_sample(sample: Sample, encoding: Encoding, parts: frozenset[str] | None = None) -> EncodedSample:
    """Decode and tokenize a sample.

    parts: what is made of it: `TOKENS` or `QUESTION`, without which ids and labels are empty, and the units whose media
    are decoded, or whose sizes alone are wanted (`grid_part`); None makes all. Sizes are complete in any case.
    Raises SampleError naming it: media missing or damaged, markers that do not match the media, too long, or
    nothing to learn.
    """
    layout = _lay_out(sample, encoding)
    for refusal in _refusals(sample, encoding, layout):
        raise refusal
    return _encoded(sample, encoding, layout, parts)


def encode_prompt(sample: Sample, encoding: Encoding) -> EncodedPrompt:
    """A sample without its last answer, as a model continues it. Its ids are those that `encode_sample` starts with.

    Raises SampleError naming it.
    """
    prompt, answer = _without_answer(sample, encoding)
    return EncodedPrompt(_encoded(prompt, encoding, _lay_out(prompt, encoding, for_generation=True)), answer)


def _without_answer(sample: Sample, encoding: Encoding) -> tuple[Sample, str]:
    """The sample up to its last answer, and that answer's text. Raises SampleError where nothing is asked."""
    turns, answer, unplaced = sample.turns, "", sample.unplaced
    if turns and turns[-1].role == "assistant":
        answer = "".join(part for part in turns[-1].content if isinstance(part, str))
        turns = turns[:-1]
        if encoding.targets:
            unplaced = _without_drawn(unplaced, answer, encoding)
    if not turns:
        raise SampleError(sample.id, "has no question, so nothing to answer", "remove it from data.eval")
    return Sample(sample.id, turns, unplaced), answer


def _without_drawn(unplaced: tuple[Media, ...], answer: str, encoding: Encoding) -> tuple[Media, ...]:
    """Without the media that the markers of the last answer stand for, which are the last of their kind."""
    markers = encoding.markers["assistant"]
    left = list(unplaced)
    for marker in () if markers is None else markers[0].findall(answer):
        assert markers is not None
        of_kind = [at for at, media in enumerate(left) if media.kind == markers[1][marker].kind]
        if of_kind:
            del left[of_kind[-1]]
    return tuple(left)


def find_problems(sample: Sample, encoding: Encoding, deep: bool) -> list[SampleError]:
    """Every reason why `encode_sample` would refuse the sample (or `encode_prompt`, where it is held out); with `deep`
    off, media are not decoded."""
    try:
        layout = _lay_out_to_judge(sample, encoding)
    except SampleError as error:
        return [error]
    problems = list(_refusals(sample, encoding, layout))
    for item in layout.items if deep else ():
        if item.goes_on:
            continue
        try:
            _processed(sample, item)
        except SampleError as error:
            problems.append(error)
    return problems


def measure_sample(sample: Sample, encoding: Encoding) -> SampleSizes:
    """What `encode_sample` would give, from headers alone. Raises SampleError naming it where tokens are not known, or
    where it is held out and asks nothing; a long sample is measured, not refused."""
    layout = _lay_out_to_judge(sample, encoding)
    return SampleSizes(
        layout.sizes(encoding),
        int(layout.targets.sum()),
        content_digest(layout.ids, layout.labels),
        tuple(_nothing_to_learn(sample, encoding, layout)),
    )


def too_long(sample: str, tokens: int, max_length: int) -> SampleError:
    """Why a sample of so many tokens is refused."""
    return SampleError(
        sample,
        f"has {tokens} tokens, more than the {max_length} allowed",
        "raise 'data.max_length' (and 'train.row_tokens'), shorten it, or set 'data.on_error: skip'",
    )


def media_of(sample: Sample, encoding: Encoding) -> Iterator[tuple[int, int, Media, str]]:
    """The media of a sample in the order of its tokens: the place of the first, how many stand for it, the item, and
    the unit that reads it. Raises SampleError naming the sample."""
    layout = _lay_out(sample, encoding)
    at = 0
    for item in layout.items:
        at += int(np.argmax(layout.ids[at:] == item.unit.placeholder_id))
        yield at, item.merged_tokens, item.media, item.unit.name
        at += item.merged_tokens


@dataclass(frozen=True, slots=True)
class _Item:
    """A media item and the unit that reads or draws it, with tokens in that unit and in the language model."""

    media: Media
    unit: Unit
    encoder_tokens: int
    merged_tokens: int
    grid: Mapping[str, EncoderInput]
    goes_on: bool = False
    """Whether it is more of a clip of which a piece came before."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of a clip that stand together; the first has all that its encoder works on."""

    tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    ids: NDArray[np.int64]
    targets: NDArray[np.bool_]
    items: tuple[_Item, ...]
    is_cut: bool = False

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.where(self.targets, self.ids, NO_LOSS)

    def sizes(self, encoding: Encoding) -> dict[str, int]:
        sizes = dict.fromkeys(encoding.unit_names, 0)
        sizes[LANGUAGE] = len(self.ids)
        for item in self.items:
            sizes[item.unit.name] += item.encoder_tokens
        return sizes


def _refusals(sample: Sample, encoding: Encoding, layout: _Layout) -> Iterator[SampleError]:
    """What is wrong with a sample whose every part can be read."""
    if encoding.max_length is not None and len(layout.ids) > encoding.max_length:
        yield too_long(sample.id, len(layout.ids), encoding.max_length)
    yield from _nothing_to_learn(sample, encoding, layout)


def _nothing_to_learn(sample: Sample, encoding: Encoding, layout: _Layout) -> Iterator[SampleError]:
    answers = [part for turn in sample.turns if turn.role == "assistant" for part in turn.content]
    if encoding.train_on == "assistant" and not layout.targets.any():
        if answers and layout.is_cut:
            yield SampleError(
                sample.id,
                f"has no answer within its first {encoding.cuts_at} tokens, so nothing to learn",
                "raise 'data.max_length', or remove it",
            )
            return
        yield SampleError(sample.id, "has no assistant answer, so nothing to learn", "add one or remove it")
    elif answers and not any(isinstance(part, Media) or part.strip() for part in answers):
        yield SampleError(sample.id, "has only empty answers", "write one or remove it")


def _encoded(
    sample: Sample, encoding: Encoding, layout: _Layout, parts: frozenset[str] | None = None
) -> EncodedSample:
    media: dict[str, dict[str, list[EncoderInput]]] = {}
    for item in layout.items:
        if item.goes_on:
            continue
        if parts is None or item.unit.name in parts:
            made: Mapping[str, EncoderInput] = _processed(sample, item)
        elif grid_part(item.unit.name) in parts:
            made = item.grid
        else:
            continue
        collected = media.setdefault(item.unit.name, {})
        for name, values in made.items():
            collected.setdefault(name, []).append(values)
    together = {
        unit: {name: joined(values) for name, values in inputs.items()} for unit, inputs in media.items()
    }
    ids, labels = layout.ids, layout.labels
    if parts is not None and QUESTION in parts:
        labels = _labels_of_answer(sample, encoding, labels)
    elif parts is not None and TOKENS not in parts:
        ids, labels = ids[:0], labels[:0]
    return EncodedSample(sample.id, ids, labels, together, layout.sizes(encoding))


def _labels_of_answer(sample: Sample, encoding: Encoding, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The labels with no loss but on the last answer. Raises SampleError where nothing is asked."""
    before = len(_lay_out(_without_answer(sample, encoding)[0], encoding, for_generation=True).ids)
    answer = np.where(np.arange(len(labels)) < before, NO_LOSS, labels)
    ends = np.flatnonzero(answer == encoding.chat.eos_id)
    if len(ends):  # what a template writes behind the answer is not judged
        answer[int(ends[0]) + 1 :] = NO_LOSS
    return answer


def _lay_out_to_judge(sample: Sample, encoding: Encoding) -> _Layout:
    """`_lay_out`; a sample that is held out must have a question which can be laid out, too. Raises SampleError."""
    if encoding.held_out:
        _lay_out(_without_answer(sample, encoding)[0], encoding, for_generation=True)
    return _lay_out(sample, encoding)


def _lay_out(sample: Sample, encoding: Encoding, for_generation: bool = False) -> _Layout:
    """Token ids with every media item expanded, from sizes alone."""
    messages, placed, prepended = _place_media(sample, encoding)
    try:
        tokens = encoding.chat.tokens(messages, for_generation)
    except UserError as error:
        raise SampleError(sample.id, str(error)) from None
    for target in encoding.targets:
        if bool((tokens.ids == target.placeholder_id).any()):
            raise SampleError(
                sample.id,
                f"the text holds the token by which the model asks {target.name!r} for an image",
                "remove it; an image in an assistant's turn stands for itself",
            )
    together = Counter(unit.name for _, unit, *_ in (*prepended, *placed))
    items = tuple(_sized(sample, *each, alone=together[each[1].name] == 1) for each in (*prepended, *placed))
    front, inside = items[: len(prepended)], items[len(prepended) :]
    targets = tokens.answered if encoding.train_on == "assistant" else tokens.ids != -1
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
    targets[:1] = False  # nothing comes before it that could predict it
    if for_generation or encoding.cuts_at is None or len(ids) <= encoding.cuts_at:
        return _Layout(ids, targets, items)
    return _cut(ids, targets, items, encoding.cuts_at)


def _cut(
    ids: NDArray[np.int64], targets: NDArray[np.bool_], items: tuple[_Item, ...], length: int
) -> _Layout:
    """The first `length` tokens, or less: not a part of a media item."""
    at = kept = 0
    for item in items:
        at += int(np.argmax(ids[at:] == item.unit.placeholder_id))
        if at + item.merged_tokens > length:
            length = min(at, length)
            break
        at += item.merged_tokens
        kept += 1
    return _Layout(ids[:length], targets[:length], items[:kept], is_cut=True)


@contextmanager
def _naming(sample: Sample, media: Media) -> Iterator[None]:
    """Inside, what is wrong with an item's header or size is a SampleError."""
    try:
        yield
    except MediaError as error:
        raise error.of(sample.id) from None
    except ValueError as error:
        raise SampleError(
            sample.id, f"{media.kind} {media.name!r}: {error}", "replace the file or remove the sample"
        ) from None


def _sized(sample: Sample, media: Media, unit: Unit, piece: _Piece | None = None, *, alone: bool) -> _Item:
    with _naming(sample, media):
        if piece is not None and not piece.is_first:
            return _Item(media, unit, 0, piece.tokens, {}, goes_on=True)
        size = replace(media_size(media), alone=alone)
        grid = unit.grid(size) if isinstance(unit, _WITH_GRIDS) else {}
        merged = unit.merged_tokens(size) if piece is None else piece.tokens
        return _Item(media, unit, unit.encoder_tokens(size), merged, grid)


def _processed(sample: Sample, item: _Item) -> dict[str, EncoderInput]:
    try:
        if isinstance(item.unit, AnyresImageUnit):
            return item.unit.process(item.media, bool(np.asarray(item.grid[SHAPES])[0, 2]))
        return item.unit.process(item.media)
    except MediaError as error:
        raise error.of(sample.id) from None
    except (ValueError, MemoryError) as error:
        reason = "there is not enough memory" if isinstance(error, MemoryError) else error
        raise SampleError(
            sample.id,
            f"the processor of {item.unit.name!r} refuses {item.media.kind} {item.media.name!r}: {reason}",
            "replace the file or remove the sample",
        ) from None


_Placed = list[tuple[Media, Unit] | tuple[Media, Unit, _Piece]]


def _place_media(sample: Sample, encoding: Encoding) -> tuple[list[Message], _Placed, _Placed]:
    """Messages with a `MEDIA` character for every item, those items in order, and the items that go before all text.

    Markers in the text take the unplaced media of their unit's kind, in order. Media of a kind that has no marker in
    the text go before the first user turn. A model that draws learns to draw the images in an assistant's turn; where
    another turn follows, its encoder reads them, too.
    """
    waiting: dict[MediaKind, deque[Media]] = {kind: deque() for kind in get_args(MediaKind)}
    for media in sample.unplaced:
        waiting[media.kind].append(media)
    marked = {unit.kind for turn in sample.turns for unit in encoding.units_in(turn.role) for part in turn.content
              if isinstance(part, str) and unit.marker in part}  # fmt: skip
    read_by: dict[MediaKind, MediaUnit] = {}
    for unit in encoding.units:
        read_by.setdefault(unit.kind, unit)
    drawn_by: dict[MediaKind, ImageTarget] = {}
    for target in encoding.targets:
        drawn_by.setdefault(target.kind, target)
    leading = tuple(media for media in sample.unplaced if media.kind not in marked)
    for media in leading:
        waiting[media.kind].popleft()
    given = {kind: len(media) for kind, media in waiting.items()}
    used = dict.fromkeys(waiting, 0)
    first_user = next((at for at, turn in enumerate(sample.turns) if turn.role == "user"), 0)

    messages: list[Message] = []
    placed: _Placed = []
    prepended: _Placed = []

    def put(media: Media, unit: Unit | None) -> str:
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
        if isinstance(unit, _IN_PIECES):
            with _naming(sample, media):
                pieces = unit.pieces(media_size(media))
            placed.extend(
                (media, unit, _Piece(tokens, number == 0)) for number, (_, tokens, _) in enumerate(pieces)
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
            text.append(_fill_markers(part, encoding.markers[turn.role], waiting, used, put))
        messages.append(Message(turn.role, "".join(text)))
    problems = [
        f"{used[kind]} {kind} markers in the text for {given[kind]} {kind}s beside it"
        for kind in waiting
        if used[kind] != given[kind]
    ]
    if problems:
        raise SampleError(
            sample.id,
            ", ".join(problems),
            "write one marker for each item, or none at all to put them first",
        )
    order = {unit.name: at for at, unit in enumerate(encoding.units)}
    prepended.sort(key=lambda item: order[item[1].name])
    return messages, placed, prepended


def _fill_markers(
    text: str,
    markers: tuple[re.Pattern[str], Mapping[str, Unit]] | None,
    waiting: Mapping[MediaKind, deque[Media]],
    used: dict[MediaKind, int],
    put: Callable[[Media, Unit], str],
) -> str:
    if markers is None:
        return text
    pattern, unit_of = markers

    def fill(match: re.Match[str]) -> str:
        unit = unit_of[match.group()]
        used[unit.kind] += 1
        return put(waiting[unit.kind].popleft(), unit) if waiting[unit.kind] else ""

    return pattern.sub(fill, text)
