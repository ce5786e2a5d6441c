"""How LLaVA-OneVision sees images: a small copy and as many tiles as the image's shape asks for, without the padding of
the last ones, and with the end of each line marked. Several images of a sample are seen as one tile each, frames of
clips too, of which four neighbouring patches are one row of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.clip import decode_clip
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import EncoderInput, joined
from dilatant.data.media_units.frame_choice import FrameChoice
from dilatant.data.media_units.image_unit import PixelProcessor
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.sample import Media, MediaKind, MediaSize, Written, digest_of

SHAPES = "image_sizes"
"""The keyword for the shapes of items, int64 [items, 3]: height and width of an image and `ALONE` or `AMONG`, frames of
a clip, 0 and `CLIP`."""
AMONG, ALONE, CLIP = 0, 1, 2
"""What an item is: one of several images of a sample, its only image, or a clip."""


@dataclass(frozen=True, slots=True)
class AnyresShape:
    """pinpoints: (height, width) that images are brought to. tile: pixels on a side of one. side: patches on that side.
    most: tiles whose patches are kept; more are shrunk to these."""

    pinpoints: tuple[tuple[int, int], ...]
    tile: int
    side: int
    most: int

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles of an image beside its small copy: of the pinpoint that keeps most of it, and of
        these of the one that wastes least."""

        def kept(pinpoint: tuple[int, int]) -> tuple[int, int]:
            scale = min(pinpoint[1] / width, pinpoint[0] / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            return seen, seen - pinpoint[0] * pinpoint[1]

        best = max(self.pinpoints, key=kept)
        return best[0] // self.tile, best[1] // self.tile

    def rows(self, height: int, width: int, alone: bool) -> int:
        """Of an image, in the text."""
        if not alone:
            return self.side**2 + 1
        tall, wide = (self.side * count for count in self.tiles(height, width))
        if (tall, wide) == (0, 0):
            return self.side**2 + 1
        if width / height > wide / tall:
            tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
        ratio = math.sqrt(tall * wide / (self.most * self.side**2))
        if ratio > 1.1:
            tall, wide = int(tall // ratio), int(wide // ratio)
        return self.side**2 + tall * (wide + 1)

    def clip_rows(self, frames: int) -> int:
        """Of a clip, in the text."""
        return frames * math.ceil(self.side / 2) ** 2 + 1

    def tiles_of(self, shape: Sequence[int]) -> int:
        """Rows of the encoder that an item has, by its line of `SHAPES`."""
        first, width, kind = shape
        if kind == CLIP:
            return first
        return 1 + math.prod(self.tiles(first, width)) if kind == ALONE else 1

    def rows_of(self, shapes: NDArray[np.int64]) -> int:
        """In the text, of all items of a sample."""
        return sum(
            self.clip_rows(first) if kind == CLIP else self.rows(first, width, kind == ALONE)
            for first, width, kind in shapes.tolist()
        )


@dataclass(frozen=True, slots=True)
class AnyresImageUnit:
    """A `MediaUnit` of such images; a tile is an encoder row of `tokens_per_tile`."""

    name: str
    placeholder_id: int
    tokens_per_tile: int
    shape: AnyresShape
    processor: HuggingFaceImageProcessor
    marker: str = "<image>"
    written: Written | None = None
    merge: Literal["placeholder", "prepend"] = "placeholder"
    kind: MediaKind = "image"

    @property
    def fingerprint(self) -> str:
        parts = (self.name, self.placeholder_id, self.tokens_per_tile, self.shape, self.marker, self.written,
                 self.processor.fingerprint)  # fmt: skip
        return digest_of(parts)

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """What the projector knows of an image."""
        return {SHAPES: np.array([[size.height, size.width, size.alone]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.shape.tiles_of((size.height, size.width, size.alone)) * self.tokens_per_tile

    def merged_tokens(self, size: MediaSize) -> int:
        return self.shape.rows(size.height, size.width, size.alone)

    def process(self, media: Media, alone: bool = True) -> dict[str, EncoderInput]:
        pixels = decode_image(media, self.processor.channels)
        size = MediaSize(pixels.shape[1], pixels.shape[0], alone=alone)
        # Of two images of a sample it makes one tile each.
        asked: Any = [[pixels]] if alone else [[pixels, pixels]]
        made = self.processor.made(images=asked, return_tensors="np", input_data_format="channels_last")
        tiles = np.asarray(made["pixel_values"])[0][: self.shape.tiles_of((size.height, size.width, alone))]
        return {"pixel_values": tiles, **self.grid(size)}


@dataclass(frozen=True, slots=True)
class AnyresClipUnit:
    """A `MediaUnit` of clips: a frame is an encoder row of `tokens_per_tile`; one end is marked, behind all frames."""

    name: str
    placeholder_id: int
    tokens_per_tile: int
    shape: AnyresShape
    processor: PixelProcessor
    choice: FrameChoice
    marker: str = "<video>"
    written: Written | None = None
    merge: Literal["placeholder", "prepend"] = "placeholder"
    kind: MediaKind = "video"

    @property
    def fingerprint(self) -> str:
        return digest_of((self.name, self.placeholder_id, self.tokens_per_tile, self.shape, self.marker, self.written,
                          self.processor.fingerprint, repr(self.choice)))  # fmt: skip

    def _count(self, size: MediaSize) -> int:
        return len(self.choice.frames(size))

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """What the projector knows of a clip."""
        return {SHAPES: np.array([[self._count(size), 0, CLIP]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return self._count(size) * self.tokens_per_tile

    def merged_tokens(self, size: MediaSize) -> int:
        return self.shape.clip_rows(self._count(size))

    def process(self, media: Media) -> dict[str, EncoderInput]:
        size = media_size(media)
        frames = decode_clip(media, self.choice.frames(size).tolist(), self.processor)
        return {"pixel_values": joined([each["pixel_values"] for each in frames]), **self.grid(size)}
