"""Images: what their headers tell, and how they are decoded.

Files may be damaged, or made to do harm: what a header promises is held against limits before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.open_media import REPLACE, as_media_error, open_media
from dilatant.data.sample import Media, MediaSize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
"""Longest side of an image for its shortest: resizing to a shortest edge would make more of it than memory holds.
Native-resolution encoders (Qwen2-VL) have the same limit."""
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"})


def image_size(media: Media) -> MediaSize:
    """Pixels of the upright image, from the header alone. Raises MediaError naming the file."""
    with _opened_image(media) as image:
        width, height = (image.height, image.width) if _orientation(image) >= 5 else image.size
        return MediaSize(width=width, height=height)


def decode_image(media: Media, channels: int) -> NDArray[np.uint8]:
    """Pixels: uint8 [height, width, channels], with 1 (grey) or 3 (RGB) channels.

    Turned upright where a camera says so; on white where it is transparent; the first frame of an animation; the high
    byte of 16-bit greys. Raises MediaError naming the file.
    """
    from PIL import Image, ImageOps

    with _opened_image(media) as image, as_media_error(media, "is damaged"):
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        if upright.mode.startswith("I"):
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
        elif upright.has_transparency_data:
            layer = upright.convert("RGBA")
            upright = Image.new("RGBA", layer.size, "white")
            upright.alpha_composite(layer)
        pixels = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
    return pixels[:, :, None] if channels == 1 else pixels


def _orientation(image: Image) -> int:
    """The EXIF orientation, 1 (upright) to 8, from the header. In a PNG the tag may follow the pixels: not read."""
    return image.getexif().get(0x0112, 1) if image.format in ("JPEG", "MPO", "TIFF", "WEBP") else 1


@contextmanager
def _opened_image(media: Media) -> Iterator[Image]:
    from PIL import Image

    with open_media(media) as stream:
        with as_media_error(media, "cannot be read"):
            try:
                image = Image.open(stream)
            except Image.UnidentifiedImageError:
                raise MediaError(f"image {media.name!r} is no image in a known format", REPLACE) from None
            short, long = sorted(image.size)
            if long > MAX_ASPECT * short:
                raise MediaError(
                    f"image {media.name!r} has {image.width} x {image.height} pixels, a side more than {MAX_ASPECT} "
                    "times the other",
                    "cut it into pieces or remove the sample",
                )
            if image.mode == "F":
                raise MediaError(
                    f"image {media.name!r} holds fractions, of which nobody knows what is black and what white",
                    "save it with 8 or 16 bits a channel",
                )
        with image:
            yield image
