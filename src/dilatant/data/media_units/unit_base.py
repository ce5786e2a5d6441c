"""Base classes of media units for images, sounds and clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.image_file import decode_image
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.sample import Media, MediaKind, MediaSize, MediaUnit


@dataclass(frozen=True, slots=True)
class ImageUnitBase(MediaUnit):
    """Base class of media units for images. placeholder_id: of an image's tokens."""

    kind: ClassVar[MediaKind] = "image"
    name: str
    placeholder_id: int

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {} if before and not is_requested else self.processor.settings

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        return self.see(decode_image(media, self.processor.channels))

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        """Return the inputs of a decoded image, uint8 [height, width, channels]."""
        return dict(self.processor(pixels))


@dataclass(frozen=True, slots=True)
class SoundUnitBase(MediaUnit):
    """Base class of media units for sounds. placeholder_id: of a sound's tokens."""

    kind: ClassVar[MediaKind] = "audio"
    name: str
    placeholder_id: int

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {} if "feature_extractor_type" in before else self.processor.settings

    def decode(self, media: Media, samples: int) -> NDArray[np.float32]:
        """Decode a sound into the number of samples that its header says, as on other ranks: resampling may yield one
        more or less. Missing samples are silence."""
        window = np.zeros(samples, np.float32)
        wave = decode_audio(media, self.processor.sampling_rate)[:samples]
        window[: len(wave)] = wave
        return window


class PiecedClipUnit(MediaUnit):
    """Base class of media units for clips that are written in several places, with text between."""

    __slots__ = ()
    kind: ClassVar[MediaKind] = "video"

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each group of the clip's tokens, the text before them, their number, and the text after them."""
        raise NotImplementedError
