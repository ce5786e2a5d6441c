"""LLaVA-OneVision images and clips (any-resolution tiling). An image becomes a downsized copy and as many tiles as its
shape needs, without the padding of the last tiles and with an end token per row of patches. If a sample has several
images, each is one tile; so is each frame of a clip, whose patches are pooled 2 x 2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.clip import decode_clip
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.pixels import EncoderInput, concatenate_inputs
from dilatant.data.media_units.frame_choice import FrameChoice, saved_limits
from dilatant.data.media_units.image_unit import PixelProcessor
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import Media, MediaKind, MediaMarkup, MediaSize, MediaUnit

SHAPES = "image_sizes"
"""Keyword for the shapes of items, int64 [items, 3]: height, width and `ALONE` or `AMONG` for an image; frames, 0 and
`CLIP` for a clip."""
AMONG, ALONE, CLIP = 0, 1, 2
"""Kind of an item: one of several images of a sample, the only image of a sample, or a clip."""


@dataclass(frozen=True, slots=True)
class AnyresShape:
    """Tiling rules. pinpoints: candidate resolutions (height, width). tile: side of a tile in pixels. side: patches on
    a side of a tile. most: maximum number of tiles whose patches are kept; more are downsampled to this number."""

    pinpoints: tuple[tuple[int, int], ...]
    tile: int
    side: int
    most: int

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of an image's tiles, without the downsized copy: those of the pinpoint that keeps the
        most pixels and, among equals, wastes the fewest."""

        def kept(pinpoint: tuple[int, int]) -> tuple[int, int]:
            scale = min(pinpoint[1] / width, pinpoint[0] / height)
            seen = min(int(width * scale) * int(height * scale), width * height)
            return seen, seen - pinpoint[0] * pinpoint[1]

        best = max(self.pinpoints, key=kept)
        return best[0] // self.tile, best[1] // self.tile

    def rows(self, height: int, width: int, alone: bool) -> int:
        """Return the number of language-model tokens of an image."""
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
        """Return the number of language-model tokens of a clip."""
        return frames * math.ceil(self.side / 2) ** 2 + 1

    def tiles_of(self, shape: Sequence[int]) -> int:
        """Return the number of tiles (encoder rows) of an item with this row of `SHAPES`."""
        first, width, kind = shape
        if kind == CLIP:
            return first
        return 1 + math.prod(self.tiles(first, width)) if kind == ALONE else 1

    def rows_of(self, shapes: NDArray[np.int64]) -> int:
        """Return the number of language-model tokens of all items of a sample."""
        return sum(
            self.clip_rows(first) if kind == CLIP else self.rows(first, width, kind == ALONE)
            for first, width, kind in shapes.tolist()
        )


@dataclass(frozen=True, slots=True)
class AnyresImageUnit(ImageUnitBase):
    """Media unit for images; each tile is one encoder row of `tokens_per_tile`."""

    tokens_per_tile: int
    shape: AnyresShape
    processor: HuggingFaceImageProcessor
    marker: str = "<image>"
    written: MediaMarkup | None = None

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the encoder inputs that the projector needs of an image, from its size."""
        return {SHAPES: np.array([[size.height, size.width, size.alone]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.shape.tiles_of((size.height, size.width, size.alone)) * self.tokens_per_tile

    def merged_tokens(self, size: MediaSize) -> int:
        return self.shape.rows(size.height, size.width, size.alone)

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        pixels = decode_image(media, self.processor.channels)
        # The processor makes one tile of each image only if there are several.
        asked: Any = [[pixels]] if size.alone else [[pixels, pixels]]
        made = self.processor.made(images=asked, return_tensors="np", input_data_format="channels_last")
        tiles = np.asarray(made["pixel_values"])[0][: self.shape.tiles_of((size.height, size.width, size.alone))]
        return {"pixel_values": tiles, **self.grid(size)}


@dataclass(frozen=True, slots=True)
class AnyresClipUnit(MediaUnit):
    """Media unit for clips; each frame is an encoder row of `tokens_per_tile`, and one end token follows them."""

    kind: ClassVar[MediaKind] = "video"
    name: str
    placeholder_id: int
    tokens_per_tile: int
    shape: AnyresShape
    processor: PixelProcessor
    choice: FrameChoice
    marker: str = "<video>"
    written: MediaMarkup | None = None

    def _count(self, size: MediaSize) -> int:
        return len(self.choice.frames(size))

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the encoder inputs that the projector needs of a clip, from its size."""
        return {SHAPES: np.array([[self._count(size), 0, CLIP]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return self._count(size) * self.tokens_per_tile

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return saved_limits(self.choice, before)

    def merged_tokens(self, size: MediaSize) -> int:
        return self.shape.clip_rows(self._count(size))

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        frames = decode_clip(media, self.choice.frames(size).tolist(), self.processor)
        return {"pixel_values": concatenate_inputs([each["pixel_values"] for each in frames]), **self.grid(size)}
