"""The values of the data room: `Sample` (undecoded) → `EncodedSample` (token ids, labels, encoder inputs).

A `MediaUnit` describes how one encoder tokenizes its media.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput

MediaKind = Literal["image", "audio", "video"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes `offset` to `offset + length` of a file, such as a member of a tar."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a clip, in order. fps: frames per second; None for frames that were sampled already and are all
    used."""

    pictures: tuple[Media, ...]
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An undecoded image, sound or clip: a file, a slice of a file, encoded bytes, or the frames of a clip. `name` is
    used in messages."""

    kind: MediaKind
    source: Path | FileSlice | bytes | Frames
    name: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. `content` keeps text and media in reading order. extras: the message's other keys
    as key → JSON text, which chat templates may read (`tool_calls`, `reasoning_content`). carries_loss: False if an
    assistant's turn is only context."""

    role: Role
    content: tuple[str | Media, ...]
    extras: tuple[tuple[str, str], ...] = ()
    carries_loss: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation. `id` is unique in its source and names the place that the sample was read from.

    unplaced: media that the record lists outside the conversation. Markers in the text set their positions; which
    marker belongs to which encoder depends on the model, so media are placed when the sample is encoded. tools: the
    tools that the assistant may call, as JSON text for chat templates; "" for none.
    unused: the record's columns, and keys inside them, that the sample does not use.
    encoded: the user's own tokens and inputs, in place of a conversation. rejected: the whole conversation with the
    worse answer, if `turns` ends with the better one of two. desired: the record's mark of its answer as good or bad.
    """

    id: str
    turns: tuple[Turn, ...]
    unplaced: tuple[Media, ...] = ()
    tools: str = ""
    unused: tuple[str, ...] = field(default=(), compare=False)
    encoded: EncodedSample | None = field(default=None, compare=False)
    rejected: tuple[Turn, ...] = ()
    desired: bool | None = None


class Dataset(Protocol):
    """A map-style data set of undecoded samples. Picklable."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass(frozen=True, slots=True)
class MediaSize:
    """The size of a media item by its header: pixels of an image, seconds of a sound; for a clip both, and its frames.
    alone: the sample has no other item of this kind for the same encoder. stamps: the time of each frame of a clip in
    seconds from the first, if frames are not evenly spaced."""

    width: int = 0
    height: int = 0
    seconds: float = 0.0
    frames: int = 0
    alone: bool = True
    stamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaMarkup:
    """The form of media items in a model's training texts. token: the chat template's placeholder for an item; the
    model's processor replaces it with the item's tokens, between `opens` and `closes`."""

    token: str
    opens: str = ""
    closes: str = ""


class Fingerprinted:
    """Base class of dataclasses whose settings decide the sizes of media."""

    __slots__ = ()

    @property
    def fingerprint(self) -> str:
        """Changes with any setting."""
        settings = [getattr(self, each.name) for each in fields(cast(Any, self))]
        return digest_of([type(self).__name__, *(getattr(each, "fingerprint", each) for each in settings)])


class MediaUnit(Fingerprinted):
    """Base class: how one encoder tokenizes media. Every method but `process` needs only a size and decodes nothing."""

    __slots__ = ()
    kind: ClassVar[MediaKind]
    if TYPE_CHECKING:  # as a rule, fields of subclasses

        @property
        def name(self) -> str: ...
        @property
        def marker(self) -> str: ...
        @property
        def placeholder_id(self) -> int: ...
        @property
        def written(self) -> MediaMarkup | None: ...
        @property
        def processor(self) -> Any: ...

    @property
    def merge(self) -> Literal["placeholder", "prepend"]:
        return "placeholder"

    def encoder_tokens(self, size: MediaSize) -> int:
        """Return the number of tokens that the encoder processes for one item."""
        raise NotImplementedError

    def merged_tokens(self, size: MediaSize) -> int:
        """Return the number of language-model tokens of one item."""
        raise NotImplementedError

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the inputs that later stages need of one item, as far as its size tells."""
        return {}

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        """Decode one item of the size in its header into encoder inputs, whose first dimension is encoder rows."""
        raise NotImplementedError

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        """Return what an export changes in the processor's settings `before`, those of the model's files, so that
        `processors` and transformers restore this unit's. is_requested: True if the user set the processor."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample as model inputs: all of it, or only the parts that the stages of a rank use.

    input_ids, labels: int64 [tokens]. A media item stands as `merged_tokens` copies of its unit's placeholder id.
    Labels are -100 where there is no loss, and always at the first token. Both are empty if tokens were not loaded.
    media: unit → encoder input name → [encoder rows, ...]; a unit without items, or not loaded, is absent.
    sizes: unit → tokens that the unit processes ("language" included); always known.
    draw: the sample's number in training order, which keys its randomness. source: the number of its data set, if data
    are read by index. targets, content: `target_tokens` and `content_digest` from the index; if None, they are
    computed. made_seconds: time spent on reading and decoding.
    branch: of a chosen and a rejected answer to one prompt, (shared, second): both sequences begin with the first
    `shared` tokens; the chosen one goes on to token `second`, and the rejected one from there. reference: the
    log-probabilities of both answers by the reference model. desired: the mark of the first answer as good or bad, if
    the second one is another record's (see `MarkedLoss`). divergence: of the model from the reference, in a step.
    """

    id: str
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    media: Mapping[str, Mapping[str, EncoderInput]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    draw: int = 0
    targets: int | None = None
    content: int | None = None
    source: int = 0
    made_seconds: float = 0.0
    branch: tuple[int, int] | None = None
    reference: tuple[float, float] | None = None
    desired: bool | None = None
    divergence: float | None = None

    @property
    def shared_tokens(self) -> int:
        """The number of first tokens that both answers of a pair follow; 0 without a pair."""
        return 0 if self.branch is None else self.branch[0]

    def sequences(self) -> tuple[EncodedSample, ...]:
        """Return what the language model reads by itself: the sample, or each answer of a pair behind its prompt."""
        if self.branch is None:
            return (self,)
        shared, second = self.branch
        everything = np.arange(len(self.input_ids))
        found = []
        for place, at in enumerate((everything[:second], np.delete(everything, slice(shared, second)))):
            # Without a shared prompt, each answer has its own copy of the media.
            media = self.media if shared else {unit: _half_of(own, place) for unit, own in self.media.items()}
            part = replace(self, input_ids=self.input_ids[at], labels=self.labels[at], media=media)
            found.append(replace(part, branch=None, targets=None, content=None))
        return tuple(found)

    @property
    def key(self) -> str:
        """The sample's name on every rank: its draw if indexed (the id is known only after reading), else its id."""
        return self.id if self.content is None else f"draw {self.draw}"

    @property
    def target_tokens(self) -> int:
        """The number of tokens that carry loss."""
        return int((self.labels[1:] != -100).sum()) if self.targets is None else self.targets

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens before the first one that carries loss; all tokens if none does."""
        carries = self.labels != -100
        return int(carries.argmax()) if carries.any() else len(self.labels)

    @property
    def content_digest(self) -> int:
        """The `content_digest` of ids and labels."""
        return content_digest(self.input_ids, self.labels) if self.content is None else self.content


def _half_of(inputs: Mapping[str, EncoderInput], half: int) -> dict[str, EncoderInput]:
    """Return the first or the second half of the inputs that tell the sizes of items, without pixels."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    return {name: np.array_split(value, 2)[half] for name, value in arrays.items()}


def digest_of(value: object) -> str:
    """Return a SHA-256 hex digest of a value's repr, to compare settings."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def content_digest(input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    """Return a 62-bit digest of token ids and labels."""
    digest = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i8").tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(labels, "<i8").tobytes())
    return int.from_bytes(digest.digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class ExampleSpan:
    """A run of tokens: text, or one media item of the encoder `unit`.

    carries_loss: the model learns to write these tokens. picture: a small JPEG of an image. peaks: loudness of a sound
    over time, in [0, 1]. text: for a media item, its name.
    """

    text: str
    tokens: int
    carries_loss: bool = False
    unit: str = ""
    picture: bytes = b""
    peaks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """An example for reports. name: place of the sample. why: its purpose. problem: why it cannot be shown, if so."""

    name: str
    why: str
    spans: tuple[ExampleSpan, ...] = ()
    problem: str = ""
