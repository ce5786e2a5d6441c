"""Pictures that a generator learns to draw: images in an assistant's turns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dilatant.data.image_file import decode_image
from dilatant.data.image_unit import PixelProcessor
from dilatant.data.pixels import EncoderInput
from dilatant.data.sample import Media, MediaKind, MediaSize


@dataclass(frozen=True, slots=True)
class ImageTarget:
    """How one generator is asked for images, and what they are to look like.

    In the text stand `start`, which the assistant writes, and `tokens_per_item` times `placeholder_id`, behind which
    the language model says what to draw. processor: makes pictures of one size, with values of -1 to 1. marker: stands
    for a picture in an assistant's text.
    """

    name: str
    placeholder_id: int
    tokens_per_item: int
    start: str
    processor: PixelProcessor
    marker: str = "<image>"
    kind: MediaKind = "image"

    @property
    def fingerprint(self) -> str:
        parts = [self.name, self.placeholder_id, self.tokens_per_item, self.start, self.marker]
        return hashlib.sha256(repr([*parts, self.processor.fingerprint]).encode()).hexdigest()

    def encoder_tokens(self, size: MediaSize) -> int:
        """Rows of the language model that the generator takes for one item."""
        return self.tokens_per_item

    def merged_tokens(self, size: MediaSize) -> int:
        """Tokens of one item inside the language model's row."""
        return self.tokens_per_item

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """Decode one item: `pixel_values` [1, channels, height, width]."""
        return dict(self.processor(decode_image(media, self.processor.channels)))


def image_target(
    name: str,
    *,
    placeholder_id: int,
    tokens_per_item: int,
    start: str,
    marker: str,
    pixels: tuple[int, int, int],
) -> ImageTarget:
    """A target whose pictures have `pixels` [channels, height, width]: squares are cropped, others stretched."""
    channels, height, width = pixels
    processor = PixelProcessor(
        height=height,
        width=width,
        channels=channels,
        shortest_edge=height if height == width else None,
    )
    return ImageTarget(name, placeholder_id, tokens_per_item, start, processor, marker)
