"""Image files: read sizes from headers, and decode.

Files may be damaged or malicious: a header's claims are checked against limits before anything is allocated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.open_media import REPLACE, as_media_error, open_media
from dilatant.data.sample import Media, MediaSize

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
"""Largest ratio of an image's sides: beyond it, resizing the shortest edge would exhaust memory. Native-resolution
encoders (Qwen2-VL) have the same limit."""
IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"})
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM", "ICO", "DIB", "PCX", "QOI", "PSD",
           "SGI", "DDS", "TGA")  # fmt: skip
"""Formats that Pillow decodes itself. For others (EPS, PostScript) it runs external programs on the file's content."""


def image_size(media: Media) -> MediaSize:
    """Return the pixels of the upright image, from the header alone. Raises MediaError naming the file."""
    with _opened_image(media) as (image, orientation):
        width, height = upright_size(image, orientation)
        return MediaSize(width=width, height=height)


def decode_image(media: Media, channels: int) -> NDArray[np.uint8]:
    """Decode an image to uint8 [height, width, channels], with 1 (grey) or 3 (RGB) channels.

    The image is rotated by its EXIF orientation and placed on white if transparent; of an animation the first frame is
    used, of 16-bit grey the high byte. Raises MediaError naming the file, also if its pixels differ from its header.
    """
    with _opened_image(media) as (image, orientation), as_media_error(media, "is damaged"):
        promised = upright_size(image, orientation)
        pixels = upright_pixels(image, orientation, "L" if channels == 1 else "RGB")
        check_pixels(media, pixels, promised)
    return pixels[:, :, None] if channels == 1 else pixels


def check_pixels(media: Media, pixels: NDArray[np.uint8], promised: tuple[int, int]) -> None:
    """Raise MediaError if an image has another size than its header says, (width, height): ranks that do not decode the
    image compute with the header's size."""
    height, width = pixels.shape[:2]
    if (width, height) != promised:
        problem = f"has {width} x {height} pixels, but its header says {promised[0]} x {promised[1]}"
        raise MediaError(f"{media.kind} {media.name!r} {problem}", REPLACE)


def upright_size(image: Any, orientation: int) -> tuple[int, int]:
    """Return width and height of an opened image, or of a video frame, after rotation."""
    return (image.height, image.width) if orientation >= 5 else (image.width, image.height)


def upright_pixels(image: Image, orientation: int, mode: str) -> NDArray[np.uint8]:
    """Return the current frame of an opened image, rotated, on white, in a Pillow mode ("L" or "RGB")."""
    from PIL import Image
    from PIL.Image import Transpose

    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
    turns = (Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM, Transpose.TRANSPOSE,
             Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90)  # fmt: skip
    image = image.convert(mode)
    return np.asarray(image if orientation == 1 else image.transpose(turns[orientation - 2]))


def open_picture(stream: BinaryIO, formats: Sequence[str] = FORMATS) -> tuple[Image, int]:
    """Open an image of one of these formats, undecoded; return it with its EXIF orientation, 1 (upright) to 8.

    Raises PIL's UnidentifiedImageError for any other content.
    """
    from PIL import Image

    Image.init()
    data, head = stream, read_at(stream, 0, 21)
    stream.seek(0)
    if head[8:16] == b"WEBPVP8X" and head[20] & 2:  # animation frames may be transparent though no flag says so
        data = io.BytesIO(head[:20] + bytes([head[20] | 16]) + stream.read()[21:])
    image = Image.open(data, formats=[name for name in formats if name in Image.OPEN])
    return image, _orientation(image, stream)


def _orientation(image: Image, stream: BinaryIO) -> int:
    from PIL import Image

    if image.format == "TIFF":  # Pillow rotates it and reports the rotated size
        return 1
    with suppress(Exception):  # an unreadable orientation is ignored, as in viewers
        place = stream.tell()
        for name, at, length in png_chunks(stream) if image.format == "PNG" else ():
            if name == b"eXIf":  # may follow the pixels, which Pillow would decode to find it
                image.info["exif"] = b"Exif\0\0" + read_at(stream, at + 8, min(length - 12, 1 << 16))
        stream.seek(place)
        found = Image.Image.getexif(image).get(0x0112)
        return found if isinstance(found, int) and 1 <= found <= 8 else 1
    return 1


def png_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, offset and length (including name, length and checksum) of each chunk of a PNG."""
    at = 8
    while len(head := read_at(stream, at, 8)) == 8 and head[4:] != b"IEND":
        length = int.from_bytes(head[:4], "big") + 12
        yield head[4:], at, length
        at += length


def read_at(stream: BinaryIO, at: int, length: int) -> bytes:
    """Read bytes from an offset on; fewer at the end of the stream."""
    stream.seek(at)
    return stream.read(length)


@contextmanager
def _opened_image(media: Media) -> Iterator[tuple[Image, int]]:
    from PIL import UnidentifiedImageError

    with open_media(media) as stream:
        with as_media_error(media, "cannot be read"):
            try:
                image, orientation = open_picture(stream)
            except UnidentifiedImageError:
                raise MediaError(
                    f"image {media.name!r} is no image in a known format ({', '.join(FORMATS)})", REPLACE
                ) from None
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
            yield image, orientation
