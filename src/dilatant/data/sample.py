"""The values of the data room, from a record on disk to what a model is fed.

`Sample` (undecoded) → `EncodedSample` (token ids, labels, encoder inputs). A `MediaUnit` tells how one encoder sees its
media.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput

MediaKind = Literal["image", "audio", "video"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes `offset` to `offset + length` of a file: a member of a tar, say."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Frames:
    """The pictures of a clip in their order. fps: how many a second there are; None for pictures that were chosen
    already, all of which are seen."""

    pictures: tuple[Media, ...]
    fps: float | None = None


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound or a clip, not decoded: a file, a part of one, its encoded bytes, or the frames of a clip.
    `name` is for messages."""

    kind: MediaKind
    source: Path | FileSlice | bytes | Frames
    name: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. `content` keeps text and media in reading order. extras: its other keys, which
    chat templates may read, key → JSON text: `tool_calls` and `reasoning_content` of an assistant, say. carries_loss:
    False for an assistant's turn that is context alone."""

    role: Role
    content: tuple[str | Media, ...]
    extras: tuple[tuple[str, str], ...] = ()
    carries_loss: bool = True


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation. `id` is unique in its source and names the place it was read from.

    unplaced: media that the record lists beside the conversation. Markers in the text say where they belong, and
    which marker means which encoder is the model's affair, so they are placed when the sample is encoded.
    tools: what the assistant may call, JSON text for chat templates; "" for nothing.
    unused: columns of the record, and keys inside of them, that the sample is not made of.
    """

    id: str
    turns: tuple[Turn, ...]
    unplaced: tuple[Media, ...] = ()
    tools: str = ""
    unused: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class MediaSize:
    """What a header tells: pixels of an image, seconds of a sound; of a clip both, and its frames. alone: whether its
    sample has no other item of its kind for the same encoder. stamps: when each frame of a clip is shown, in seconds
    from the first, where they are not evenly spaced."""

    width: int = 0
    height: int = 0
    seconds: float = 0.0
    frames: int = 0
    alone: bool = True
    stamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """How items stand in texts that a model was trained with. token: what its chat template writes for one; its
    processor replaces that with its tokens, between `opens` and `closes`."""

    token: str
    opens: str = ""
    closes: str = ""


class MediaUnit(Protocol):
    """How one encoder sees media. Every method but `process` works from a size alone, without decoding."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> MediaKind: ...

    @property
    def marker(self) -> str: ...

    @property
    def placeholder_id(self) -> int: ...

    @property
    def written(self) -> Written | None: ...

    @property
    def merge(self) -> Literal["placeholder", "prepend"]: ...

    @property
    def fingerprint(self) -> str: ...

    def encoder_tokens(self, size: MediaSize) -> int:
        """Tokens the encoder works on for one item."""
        ...

    def merged_tokens(self, size: MediaSize) -> int:
        """Tokens of one item inside the language model's row."""
        ...

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """Decode one item into encoder inputs; they have encoder rows as their first dimension."""
        ...


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A sample as a model is fed, as far as it was loaded: all of it, or only the parts that a rank's stages use.

    input_ids, labels: int64 [tokens]; a media item stands as `merged_tokens` copies of its unit's placeholder id;
    labels are -100 where no loss is wanted, and already -100 at the first token. Empty where tokens were not loaded.
    media: unit → encoder input name → [encoder rows, ...]; a unit without items, or not loaded, is absent.
    sizes: unit → tokens that the unit processes ("language" included); always known.
    draw: its number in the order of training, by which randomness is keyed. source: the number of its data set, where
    data are read by index. targets, content: what an index says of `target_tokens` and `content_digest`; counted here
    where None. made_seconds: what reading and decoding it took.
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

    @property
    def key(self) -> str:
        """What it is known by on every rank: of an indexed one only the draw, for its name is read with it."""
        return self.id if self.content is None else f"draw {self.draw}"

    @property
    def target_tokens(self) -> int:
        """Tokens that carry loss."""
        return int((self.labels[1:] != -100).sum()) if self.targets is None else self.targets

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the first that carries loss; all, where none does."""
        carries = self.labels != -100
        return int(carries.argmax()) if carries.any() else len(self.labels)

    @property
    def content_digest(self) -> int:
        """What `content_digest` says of ids and labels."""
        return content_digest(self.input_ids, self.labels) if self.content is None else self.content


def digest_of(value: object) -> str:
    """What tells apart settings that are written differently."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def content_digest(input_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> int:
    """62 bits that tell apart samples with other tokens or labels."""
    digest = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i8").tobytes(), digest_size=8)
    digest.update(np.ascontiguousarray(labels, "<i8").tobytes())
    return int.from_bytes(digest.digest(), "little") >> 2
