"""Image targets: the images in an assistant's turns, which a generator learns to produce."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.pixels import EncoderInput, as_array
from dilatant.data.media_units.image_unit import ImageProcessor, PixelProcessor
from dilatant.data.media_units.latents import NAME, Latents
from dilatant.data.media_units.unit_base import UnitBase
from dilatant.data.sample import Media, MediaKind, MediaSize, digest_of


@dataclass(frozen=True, slots=True)
class ImageTarget(UnitBase):
    """Target of one generator: how the language model requests an image, and the format of the image.

    The text holds `start`, which the assistant writes, and then `tokens_per_item` placeholder tokens, whose outputs
    condition the generator. processor: makes images of one size. marker: placeholder of an image in an assistant's
    text. latents: cached latents, which replace decoded images.
    """

    name: str
    placeholder_id: int
    tokens_per_item: int
    start: str
    processor: ImageProcessor
    marker: str = "<image>"
    latents: Latents | None = None
    kind: MediaKind = "image"

    @property
    def fingerprint(self) -> str:
        parts = [self.name, self.placeholder_id, self.tokens_per_item, self.start, self.marker]
        return digest_of([*parts, self.processor.fingerprint])

    def encoder_tokens(self, size: MediaSize) -> int:
        """Return the number of language-model outputs that the generator takes for one item."""
        return self.tokens_per_item

    def merged_tokens(self, size: MediaSize) -> int:
        """Return the number of language-model tokens of one item."""
        return self.tokens_per_item

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """Return the cached `latents` [1, parts, channels, height, width] of an item or, without a cache, its
        `pixel_values` [1, channels, height, width]. Raises MediaError, also if cached latents have been lost."""
        if self.latents is None:
            return dict(self.processor(decode_image(media, self.processor.channels)))
        found = self.latents.load(media)
        if found is None:
            self.pixels(media)  # raises if the image itself is unreadable
            raise MediaError(
                f"the latents of {media.name!r} in {str(self.latents.folder)!r} are damaged or gone, or the file was "
                "changed",
                "resume the run, which makes them anew",
                may_pass=True,
            )
        return {NAME: found}

    def pixels(self, media: Media) -> NDArray[np.float32]:
        """Decode one item to the input of an autoencoder, float32 [1, channels, height, width]. Raises MediaError."""
        (pixels,) = self.processor(decode_image(media, self.processor.channels)).values()
        return np.asarray(as_array(pixels), np.float32)


def image_target(
    name: str,
    *,
    placeholder_id: int,
    tokens_per_item: int,
    start: str,
    marker: str,
    pixels: tuple[int, int, int],
    processor: ImageProcessor | None = None,
) -> ImageTarget:
    """Make a target for images of `pixels` [channels, height, width]. processor: None centre-crops images for a square
    target, stretches them for another shape, and scales to [-1, 1]."""
    channels, height, width = pixels
    if processor is None:
        processor = PixelProcessor(
            height=height,
            width=width,
            channels=channels,
            shortest_edge=height if height == width else None,
        )
    return ImageTarget(name, placeholder_id, tokens_per_item, start, processor, marker)
