"""Clips as images: for encoders without clip support, selected frames become images with text between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dilatant.data.media.clip import decode_clip
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import EncoderInput, concatenate_inputs
from dilatant.data.media_units.frame_choice import FRAME_TEXTS, FrameChoice, saved_limits
from dilatant.data.media_units.image_unit import ImageUnit
from dilatant.data.media_units.native_image_unit import NativeImageUnit
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit
from dilatant.data.media_units.unit_base import ClipUnitBase
from dilatant.data.sample import Media, MediaMarkup, MediaSize


@dataclass(frozen=True, slots=True)
class FramedClipUnit(ClipUnitBase):
    """Media unit for clips. frame: the unit for one frame, with the texts around an image. choice: selects the frames.
    texts: key in `FRAME_TEXTS` of the additional texts."""

    frame: ImageUnit | TiledImageUnit | NativeImageUnit
    choice: FrameChoice
    texts: str
    marker: str = "<video>"
    written: MediaMarkup | None = None

    @property
    def name(self) -> str:
        return self.frame.name

    @property
    def placeholder_id(self) -> int:
        return self.frame.placeholder_id

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the frames' inputs that later stages of the encoder need, from the clip's size."""
        count = len(self.choice.frames(size))
        one = self.frame.grid(_of_frame(size))
        return {name: concatenate_inputs([array] * count) for name, array in one.items()}

    def encoder_tokens(self, size: MediaSize) -> int:
        return len(self.choice.frames(size)) * self.frame.encoder_tokens(_of_frame(size))

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        sizes = self.frame.processor.limits if isinstance(self.frame, NativeImageUnit) else {}
        return {**saved_limits(self.choice, before), **sizes}

    def merged_tokens(self, size: MediaSize) -> int:
        return len(self.choice.frames(size)) * self.frame.merged_tokens(_of_frame(size))

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each frame, the text before its tokens, the number of its tokens, and the text after them."""
        image = self.frame.written or MediaMarkup("")
        tokens = self.frame.merged_tokens(_of_frame(size))
        return [
            (before + image.opens, tokens, image.closes + after)
            for before, after in FRAME_TEXTS[self.texts](size, self.choice.frames(size))
        ]

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """Decode the frames into the inputs of images, concatenated."""
        frames = self.choice.frames(media_size(media))
        made = decode_clip(media, frames.tolist(), self.frame.see)
        return {name: concatenate_inputs([each[name] for each in made]) for name in made[0]}


def _of_frame(size: MediaSize) -> MediaSize:
    return replace(size, frames=0, seconds=0.0, stamps=())
