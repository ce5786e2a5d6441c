"""Fixed-size images: resized, cropped, rescaled and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.media.pixels import EncoderInput, Pixels
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import Fingerprinted, MediaMarkup, MediaSize

Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
RESAMPLE_NAMES: tuple[Resample, ...] = get_args(Resample)
"""Resampling filters in the order of Pillow's numbers, which saved processors hold."""


class ImageProcessor(Protocol):
    """Protocol: compute encoder inputs from decoded pixels."""

    @property
    def channels(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the processor as transformers' classes, and `processors`, read them."""

    def __call__(self, pixels: NDArray[np.uint8]) -> Mapping[str, EncoderInput]:
        """Compute inputs of an image, uint8 [height, width, channels]; their first dimension is encoder rows."""


MOST_PIXELS = 1 << 14
"""Longest side of an encoder's image in pixels: more is a mistake and would use gigabytes per image."""


@dataclass(frozen=True, slots=True)
class PixelProcessor(Fingerprinted):
    """The usual steps of fixed-size vision encoders, with Pillow and numpy.

    shortest_edge: the shorter side is resized to this length, keeping the aspect ratio, and the centre (height, width)
    is cropped. None: the image is resized to (height, width), whatever its aspect ratio.
    Values are (pixel * rescale - mean) / std, with one mean and std per channel or one for all.
    """

    height: int
    width: int
    channels: int = 3
    shortest_edge: int | None = None
    resample: Resample = "bicubic"
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise UserError(f"an image encoder with {self.channels!r} channels is not supported; known: 1 and 3")
        longest = max(self.height, self.width, self.shortest_edge or 1)
        if not 1 <= min(self.height, self.width, self.shortest_edge or 1) <= longest <= MOST_PIXELS:
            raise UserError(
                f"images of {self.width} x {self.height} pixels; sides are 1 to {MOST_PIXELS:,} pixels long"
            )
        if self.resample not in RESAMPLE_NAMES:
            raise UserError(f"unknown resample {self.resample!r}; known: {', '.join(RESAMPLE_NAMES)}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise UserError(f"{name} {values!r} must have 1 value, or one for each of {self.channels} channels")
        if min(self.std) <= 0:
            raise UserError(f"std {self.std!r} must be positive")

    def __call__(self, pixels: NDArray[np.uint8]) -> Mapping[str, Pixels]:
        """Return `pixel_values`: [1, channels, height, width]."""
        from PIL import Image

        resample = Image.Resampling[self.resample.upper()]
        image = Image.fromarray(pixels[:, :, 0] if self.channels == 1 else pixels)
        if self.shortest_edge is None:
            image = image.resize((self.width, self.height), resample)
        else:
            short, long = sorted(image.size)
            other = int(self.shortest_edge * long / short)
            size = (self.shortest_edge, other) if image.width <= image.height else (other, self.shortest_edge)
            image = image.resize(size, resample)
            # Pillow pads with zeros outside the image, before normalisation, as the reference does.
            left, top = (image.width - self.width) // 2, (image.height - self.height) // 2
            image = image.crop((left, top, left + self.width, top + self.height))
        values = np.asarray(image).reshape(self.height, self.width, self.channels).transpose(2, 0, 1)
        return {"pixel_values": Pixels(np.array(values, order="C")[None], self.rescale, self.mean, self.std)}

    @property
    def settings(self) -> dict[str, Any]:
        fixed = {"height": self.height, "width": self.width}
        cropped = self.shortest_edge is not None
        return {
            "image_processor_type": "CLIPImageProcessor" if cropped else "ViTImageProcessor",
            "do_resize": True,
            "size": {"shortest_edge": self.shortest_edge} if cropped else fixed,
            "do_center_crop": cropped,
            **({"crop_size": fixed} if cropped else {}),
            "resample": RESAMPLE_NAMES.index(self.resample),
            "do_rescale": True,
            "rescale_factor": self.rescale,
            "do_normalize": True,
            # transformers needs one value per channel.
            "image_mean": list(self.mean) * (self.channels // len(self.mean)),
            "image_std": list(self.std) * (self.channels // len(self.std)),
        }


@dataclass(frozen=True, slots=True)
class ImageUnit(ImageUnitBase):
    """Media unit for an encoder whose images all have one size: an item is one encoder row.

    tokens_per_image: tokens that the encoder processes. merged_per_image: tokens that reach the language model, fewer
    if the projector pools; None for all.
    """

    tokens_per_image: int
    processor: ImageProcessor
    merged_per_image: int | None = None
    marker: str = "<image>"
    merge: Literal["placeholder", "prepend"] = "placeholder"
    written: MediaMarkup | None = None

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.tokens_per_image

    def merged_tokens(self, size: MediaSize) -> int:
        return self.tokens_per_image if self.merged_per_image is None else self.merged_per_image
