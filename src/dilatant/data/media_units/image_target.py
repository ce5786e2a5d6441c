"""Image targets: the images in an assistant's turns, which a generator learns to produce."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dilatant.config.errors import UserError
from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import is_trusted_cache_file
from dilatant.data.errors import MediaError, may_pass
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.open_media import open_media
from dilatant.data.media.pixels import EncoderInput, as_array
from dilatant.data.media_units.image_unit import ImageProcessor, PixelProcessor
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import Media, MediaSize, digest_of

NAME = "latents"
"""Name of the array in a file, and of the generator's input."""


@dataclass(frozen=True, slots=True)
class Latents:
    """Folder of latents for one autoencoder and image size. shape: [parts, channels, height, width], float32; parts are
    mean and log-variance of a variational autoencoder, or the latents themselves. Picklable."""

    folder: Path
    shape: tuple[int, int, int, int]

    def key_of(self, media: Media) -> str:
        """Return the key of a media item's bytes. Raises MediaError if the file cannot be read."""
        with open_media(media) as stream:
            try:
                return blake2b(stream.read(), digest_size=20).hexdigest()
            except OSError as error:
                raise MediaError(f"{media.name!r} cannot be read: {error}", "", may_pass(error)) from None

    def find(self, key: str) -> NDArray[np.float32] | None:
        """Return the latents under a key; None if they are missing, damaged, or of another shape or item."""
        if not is_trusted_cache_file(path := self._path(key)):
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                values, about = file.get_tensor(NAME), file.metadata() or {}
        except (OSError, SafetensorError, ValueError, TypeError):
            return None
        is_right = values.shape == self.shape and values.dtype == np.float32
        return values if is_right and about == _about(key, values) else None

    def keep(self, key: str, values: NDArray[np.float32]) -> None:
        """Store latents under a key. Raises UserError if the folder cannot be written."""
        values = np.ascontiguousarray(values)  # safetensors writes memory as it is laid out
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, save({NAME: values}, _about(key, values)))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"latents cannot be kept in {str(self.folder)!r}: {error}; set 'data.cache_dir' to a folder with room, "
                "or leave out cache_latents"
            ) from None

    def load(self, media: Media) -> NDArray[np.float32] | None:
        """Return the latents of an item, [1, *shape]. If there are none, return None and delete the marks of complete
        data sets, so that the next start computes the latents. Raises MediaError if the file cannot be read."""
        values = self.find(self.key_of(media))
        if values is None:
            for note in self.folder.glob("whole-*"):
                with suppress(OSError):
                    note.unlink()
            return None
        return values[None]

    def is_whole(self, data: str) -> bool:
        """Return True if the latents of all data with this fingerprint were once stored."""
        return (self.folder / f"whole-{data}").exists()

    def note_whole(self, data: str) -> None:
        """Mark the data with this fingerprint as completely stored."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"whole-{data}").touch()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def _about(key: str, values: NDArray[np.float32]) -> dict[str, str]:
    digest = blake2b(values.tobytes(), digest_size=16).hexdigest()
    return {"picture": key, "digest": digest}


@dataclass(frozen=True, slots=True)
class ImageTarget(ImageUnitBase):
    """Target of one generator: how the language model requests an image, and the format of the image.

    The text holds `start`, which the assistant writes, and then `tokens_per_item` placeholder tokens, whose outputs
    condition the generator. processor: makes images of one size. marker: placeholder of an image in an assistant's
    text. latents: cached latents, which replace decoded images.
    """

    tokens_per_item: int
    start: str
    processor: ImageProcessor
    marker: str = "<image>"
    latents: Latents | None = None

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

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
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
            height=height, width=width, channels=channels, shortest_edge=height if height == width else None
        )
    return ImageTarget(name, placeholder_id, tokens_per_item, start, processor, marker)
