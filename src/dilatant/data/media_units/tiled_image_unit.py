"""Tiled images: the processor of a pretrained VLM cuts an image into tiles of one size, each an encoder row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import MediaMarkup, MediaSize


@dataclass(frozen=True, slots=True)
class TiledImageUnit(ImageUnitBase):
    """Media unit for tiled images: the image size determines the tiles; each is one encoder row of `tokens_per_tile`,
    of which `merged_per_tile` reach the language model."""

    tokens_per_tile: int
    merged_per_tile: int
    row_shape: tuple[int, int, int]
    processor: HuggingFaceImageProcessor
    marker: str = "<image>"
    written: MediaMarkup | None = None

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.processor.patches(size.height, size.width) * self.tokens_per_tile

    def merged_tokens(self, size: MediaSize) -> int:
        return self.processor.patches(size.height, size.width) * self.merged_per_tile

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        rows = np.asarray(self.processor(pixels)["pixel_values"]).reshape(-1, *self.row_shape)
        expected = self.processor.patches(*pixels.shape[:2])
        if len(rows) != expected:
            raise ValueError(f"it made {len(rows)} tiles where its sizes say {expected}")
        return {"pixel_values": rows}


def check_tiles(processor: HuggingFaceImageProcessor, row_shape: tuple[int, int, int]) -> None:
    """Run the processor on images of two shapes. Raises UserError if the rows' shape differs from the encoder's, or
    their number from the processor's rule."""
    channels, height, width = row_shape
    for tall, wide in ((height + 7, width + 3), (height, 3 * width + 1)):
        made = np.asarray(processor(np.full((tall, wide, channels), 128, np.uint8))["pixel_values"])
        told = processor.patches(tall, wide)
        if made.shape[-3:] != row_shape or made.size != told * channels * height * width:
            raise UserError(
                f"model.processor makes {made.shape} of one image of {tall} x {wide}, but the encoder takes "
                f"{told} rows of {row_shape} (channels, height, width)"
            )


RATIOS = "aspect_ratio_ids"
"""Keyword for the id of each image's tile layout: int64 [images, 1]."""
TILES = "aspect_ratio_mask"
"""Keyword for the mask of each image's tiles that are not padding: int64 [images, 1, tiles]."""


@dataclass(frozen=True, slots=True)
class AspectImageUnit(ImageUnitBase):
    """Media unit for images of `tokens_per_image` encoder tokens each, padding tiles included."""

    tokens_per_image: int
    processor: HuggingFaceImageProcessor
    marker: str = "<image>"
    written: MediaMarkup | None = None

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the inputs that the language model needs of an image, from its size."""
        from transformers.models.mllama import image_processing_pil_mllama as family

        made: Any = self.processor.made
        tile, most = made.size["height"], made.max_image_tiles
        height, width = family.get_optimal_tiled_canvas(size.height, size.width, most, tile)
        rows, columns = int(height) // tile, int(width) // tile
        ratio = family.get_all_supported_aspect_ratios(most).index((rows, columns)) + 1
        used = np.arange(most) < rows * columns
        return {RATIOS: np.array([[ratio]], np.int64), TILES: used.astype(np.int64)[None, None]}

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.tokens_per_image

    def merged_tokens(self, size: MediaSize) -> int:
        return 1

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        tiles = np.asarray(self.processor(pixels)["pixel_values"])
        return {
            "pixel_values": tiles.reshape(1, 1, *tiles.shape[-4:]),
            **self.grid(MediaSize(pixels.shape[1], pixels.shape[0])),
        }
