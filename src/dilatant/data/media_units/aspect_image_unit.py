"""Mllama images: each has the same number of tiles, some of them padding, and one token in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import MediaMarkup, MediaSize

RATIOS = "aspect_ratio_ids"
"""Keyword for the id of each image's tile layout: int64 [images, 1]."""
TILES = "aspect_ratio_mask"
"""Keyword for the mask of each image's tiles that are not padding: int64 [images, tiles]."""


@dataclass(frozen=True, slots=True)
class AspectImageUnit(ImageUnitBase):
    """Media unit for images of `tokens_per_image` encoder tokens each, padding tiles included."""

    name: str
    placeholder_id: int
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
        return {
            RATIOS: np.array([[ratio]], np.int64),
            TILES: (np.arange(most) < rows * columns).astype(np.int64)[None],
        }

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.tokens_per_image

    def merged_tokens(self, size: MediaSize) -> int:
        return 1

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        tiles = np.asarray(self.processor(pixels)["pixel_values"])
        return {
            "pixel_values": tiles.reshape(1, *tiles.shape[-4:]),
            **self.grid(MediaSize(pixels.shape[1], pixels.shape[0])),
        }
