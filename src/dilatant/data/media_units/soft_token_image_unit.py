"""Gemma 4 images: resized to as many soft tokens as a limit allows, keeping the aspect ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dilatant.config.errors import UserError
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES
from dilatant.data.media_units.native_image_unit import PatchProcessor, mismatches, pixel_settings
from dilatant.data.sample import MediaSize

SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Valid values of `max_soft_tokens`; the first is for frames of clips."""


@dataclass(frozen=True, slots=True)
class SoftTokenProcessor(PatchProcessor):
    """`PatchProcessor` that limits an image to `soft_tokens` groups of `merge` by `merge` patches."""

    soft_tokens: int = 280

    def grid(self, size: MediaSize) -> tuple[int, int]:
        """Return an image's patches: (rows, columns). Raises ValueError if the image would be resized to nothing."""
        height, width = size.height, size.width
        side = self.patch * self.merge
        factor = math.sqrt(self.soft_tokens * side**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not (rows or columns):
            raise ValueError(f"{width} x {height} would be resized to nothing")
        if not rows:
            rows, columns = 1, min(width // height, self.soft_tokens)
        elif not columns:
            rows, columns = min(height // width, self.soft_tokens), 1
        return rows * self.merge, columns * self.merge

    @property
    def limits(self) -> dict[str, Any]:
        return {"max_soft_tokens": self.soft_tokens}

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            **self.limits,
            "patch_size": self.patch,
            "pooling_kernel_size": self.merge,
            "resample": RESAMPLE_NAMES.index(self.resample),
            "rescale_factor": self.rescale,
        }


_KNOWN = (
    *("patch_size", "max_soft_tokens", "pooling_kernel_size", "resample", "do_convert_rgb"),
    *("do_resize", "do_rescale", "do_normalize", "rescale_factor", "image_mean", "image_std"),
    *("image_seq_length", "size"),
)


def soft_token_processor(settings: Mapping[str, Any], *, patch: int, merge: int) -> SoftTokenProcessor:
    """Make the processor of saved settings for an encoder with these patches. Raises UserError if they do not match."""
    wrong = mismatches(settings, _KNOWN, {"patch_size": patch, "pooling_kernel_size": merge})
    wrong += [
        f"{key} is not of this family, whose images are limited by max_soft_tokens"
        for key in ("min_pixels", "max_pixels")
        if settings.get(key)
    ]
    tokens = settings.get("max_soft_tokens", 280)
    if tokens not in SOFT_TOKENS:
        wrong.append(f"max_soft_tokens is {tokens!r}; it must be one of {', '.join(map(str, SOFT_TOKENS))}")
    if settings.get("do_normalize") and not {"image_mean", "image_std"} <= settings.keys():
        wrong.append("do_normalize needs image_mean and image_std")
    if wrong:
        raise UserError(f"model.processor: {'; '.join(wrong)}")
    values = pixel_settings(settings, normalizes=False)
    return SoftTokenProcessor(patch=patch, merge=merge, frames=1, soft_tokens=tokens, **values)
