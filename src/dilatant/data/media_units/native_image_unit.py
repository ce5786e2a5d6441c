"""Native-resolution images (Qwen-VL): resized as little as possible and cut into patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, as_user_error
from dilatant.data.media.pixels import EncoderInput, Pixels
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES, Resample
from dilatant.data.media_units.unit_base import ImageUnitBase
from dilatant.data.sample import Fingerprinted, MediaMarkup, MediaSize

GRID = "image_grid_thw"
"""Encoder keyword for the patches of every image: frames, rows, columns."""
STEP = "time_step"
"""Keyword for the distance of temporal patches in text positions: float [items]."""
LONGEST_ASPECT = 200
"""Largest ratio of an image's sides; the families refuse larger ratios, too."""


@dataclass(frozen=True, slots=True)
class PatchProcessor(Fingerprinted):
    """Qwen-VL's image processing with Pillow and numpy. An image is resized so that both sides are multiples of `merge`
    patches and the area is between `min_pixels` and `max_pixels`; a still image is treated as `frames` equal frames."""

    channels: ClassVar[int] = 3
    patch: int = 14
    merge: int = 2
    frames: int = 2
    min_pixels: float = 56 * 56
    max_pixels: float = 28 * 28 * 1280
    resample: Resample = "bicubic"
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise UserError(
                f"processor: min_pixels {self.min_pixels} must be at least 1 and no more than max_pixels "
                f"{self.max_pixels}"
            )

    def grid(self, size: MediaSize) -> tuple[int, int]:
        """Return an image's patches: (rows, columns). Raises ValueError if its sides exceed `LONGEST_ASPECT`."""
        height, width = size.height, size.width
        if max(height, width) > LONGEST_ASPECT * min(height, width):
            raise ValueError(f"{width} x {height} is longer than {LONGEST_ASPECT} times its width")
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / unit))
            columns = max(1, math.floor(width / shrink / unit))
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / unit), math.ceil(width * grow / unit)
        return rows * self.merge, columns * self.merge

    def __call__(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        """Return `pixel_values`: [patches, channels, frames * patch, patch], merge groups contiguous; and the grid."""
        from PIL import Image

        rows, columns = self.grid(MediaSize(width=pixels.shape[1], height=pixels.shape[0]))
        image = Image.fromarray(pixels).resize(
            (columns * self.patch, rows * self.patch), Image.Resampling[self.resample.upper()]
        )
        merge, patch = self.merge, self.patch
        values = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        values = values.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch, patch)
        values = np.tile(values, (1, 1, self.frames, 1))
        grid = np.array([[1, rows, columns]], np.int64)
        patches = Pixels(values, self.rescale, self.mean, self.std)
        return {"pixel_values": patches, GRID: grid, STEP: np.ones(1)}

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of an image's size, under both names that transformers has used for them."""
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}, **limits}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the processor as transformers' classes read them."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            **self.limits,
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": self.frames,
            "resample": RESAMPLE_NAMES.index(self.resample),
            "rescale_factor": self.rescale,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


_SETTINGS = ("min_pixels", "max_pixels", "size", "patch_size", "merge_size", "temporal_patch_size", "resample",
             "do_resize", "do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std",
             "do_convert_rgb")  # fmt: skip


def patch_processor(settings: Mapping[str, Any], *, patch: int, merge: int, frames: int) -> PatchProcessor:
    """Make the processor of saved settings for an encoder with these patches. Raises UserError if they do not match."""
    unknown = [key for key in settings if key not in _SETTINGS and not key.endswith("_type")]
    if unknown and "image_processor_type" not in settings:
        raise UserError(f"model.processor: unknown setting {unknown[0]!r}; known: {', '.join(_SETTINGS)}")
    wrong = [
        f"{key} is {settings[key]}, but the encoder has {value}"
        for key, value in {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames}.items()
        if settings.get(key, value) != value
    ]
    wrong += [f"{key} is off" for key in ("do_resize", "do_rescale") if settings.get(key, True) is not True]
    if wrong:
        raise UserError(f"model.processor: {'; '.join(wrong)}")
    with as_user_error("model.processor", TypeError, ValueError, AttributeError):
        size = settings.get("size") or {}
        limits = {
            "min_pixels": settings.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": settings.get("max_pixels") or size.get("longest_edge"),
        }
        given: dict[str, Any] = {key: int(value) for key, value in limits.items() if value}
    return PatchProcessor(patch=patch, merge=merge, frames=frames, **given, **_pixel_settings(settings))


def _pixel_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what saved settings say of resampling and of values, as `PatchProcessor` calls it. Raises UserError."""
    settings = {"do_normalize": True} | {key: value for key, value in settings.items() if value is not None}
    given: dict[str, Any] = {}
    with as_user_error("model.processor", TypeError, ValueError, IndexError):
        if "resample" in settings:
            given["resample"] = RESAMPLE_NAMES[int(settings["resample"])]
        if "rescale_factor" in settings:
            given["rescale"] = float(settings["rescale_factor"])
        for name, key, neutral in (("mean", "image_mean", 0.0), ("std", "image_std", 1.0)):
            if not settings["do_normalize"]:
                given[name] = (neutral,)
            elif key in settings:
                given[name] = tuple(map(float, settings[key]))
    return given


@dataclass(frozen=True, slots=True)
class NativeImageUnit(ImageUnitBase):
    """Media unit for a native-resolution encoder: an image has one encoder token per patch."""

    processor: PatchProcessor
    marker: str = "<image>"
    written: MediaMarkup | None = None

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the grid of an image, for later stages of the encoder and for text positions."""
        return {GRID: np.array([[1, *self.processor.grid(size)]], np.int64), STEP: np.ones(1)}

    def encoder_tokens(self, size: MediaSize) -> int:
        rows, columns = self.processor.grid(size)
        return rows * columns

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        if "image_processor_type" in before:
            return self.processor.limits  # which a run may change
        return ImageUnitBase.saved_settings(self, before, is_requested)

    def merged_tokens(self, size: MediaSize) -> int:
        return self.encoder_tokens(size) // self.processor.merge**2
