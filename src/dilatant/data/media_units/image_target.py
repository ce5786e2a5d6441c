"""Pictures that a generator learns to draw: images in an assistant's turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.pixels import EncoderInput, as_array
from dilatant.data.media_units.image_unit import ImageProcessor, PixelProcessor
from dilatant.data.media_units.latents import NAME, Latents
from dilatant.data.sample import Media, MediaKind, MediaSize, digest_of


@dataclass(frozen=True, slots=True)
class ImageTarget:
    """How one generator is asked for images, and what they are to look like.

    In the text stand `start`, which the assistant writes, and `tokens_per_item` times `placeholder_id`, behind which
    the language model says what to draw. processor: makes pictures of one size. marker: stands
    for a picture in an assistant's text. latents: those that are kept, by which pictures need not be decoded.
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
        """Rows of the language model that the generator takes for one item."""
        return self.tokens_per_item

    def merged_tokens(self, size: MediaSize) -> int:
        """Tokens of one item inside the language model's row."""
        return self.tokens_per_item

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """One item: its `latents` [1, parts, channels, height, width] where they are kept, else decoded `pixel_values`
        [1, channels, height, width]. Raises MediaError, also where latents that were kept are not there any more."""
        if self.latents is None:
            return dict(self.processor(decode_image(media, self.processor.channels)))
        found = self.latents.load(media)
        if found is None:
            self.pixels(media)  # raises, where there cannot be any
            raise MediaError(
                f"the latents of {media.name!r} in {str(self.latents.folder)!r} are damaged or gone, or the file was "
                "changed",
                "resume the run, which makes them anew",
                may_pass=True,
            )
        return {NAME: found}

    def pixels(self, media: Media) -> NDArray[np.float32]:
        """One item as an autoencoder sees it, [1, channels, height, width]. Raises MediaError."""
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
    """A target whose pictures have `pixels` [channels, height, width]. processor: None crops squares, stretches
    others, and gives values of -1 to 1."""
    channels, height, width = pixels
    if processor is None:
        processor = PixelProcessor(
            height=height,
            width=width,
            channels=channels,
            shortest_edge=height if height == width else None,
        )
    return ImageTarget(name, placeholder_id, tokens_per_item, start, processor, marker)
