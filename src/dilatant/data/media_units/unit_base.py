"""Base classes of media units and processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.image_file import decode_image
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.sample import Media, MediaKind, MediaSize, digest_of


class Fingerprinted:
    """Base class of dataclasses whose settings decide the sizes of media."""

    __slots__ = ()

    @property
    def fingerprint(self) -> str:
        """Changes with any setting."""
        settings = [getattr(self, field.name) for field in fields(cast(Any, self))]
        return digest_of([type(self).__name__, *(getattr(each, "fingerprint", each) for each in settings)])


class UnitBase(Fingerprinted):
    """Base class of media units whose items need nothing but their tensors."""

    __slots__ = ()
    kind: MediaKind

    @property
    def merge(self) -> Literal["placeholder", "prepend"]:
        return "placeholder"

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the inputs that later stages need of an item, which are computed from its size alone."""
        return {}

    def process_item(self, media: Media, grid: Mapping[str, EncoderInput]) -> dict[str, EncoderInput]:
        return dict(cast(Any, self).process(media))


class ImageUnitBase(UnitBase):
    """Base class of media units for images."""

    __slots__ = ()
    kind: MediaKind = "image"
    if TYPE_CHECKING:

        @property
        def processor(self) -> Any: ...

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {} if before and not is_requested else self.processor.settings

    def process(self, media: Media) -> dict[str, EncoderInput]:
        return self.see(decode_image(media, self.processor.channels))

    def see(self, pixels: NDArray[np.uint8]) -> dict[str, EncoderInput]:
        """Return the inputs of a decoded image, uint8 [height, width, channels]."""
        return dict(self.processor(pixels))


class SoundUnitBase(UnitBase):
    """Base class of media units for sounds."""

    __slots__ = ()
    kind: MediaKind = "audio"
    if TYPE_CHECKING:

        @property
        def processor(self) -> Any: ...

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {} if "feature_extractor_type" in before else self.processor.settings

    def decode(self, media: Media, samples: int) -> NDArray[np.float32]:
        """Decode a sound into the number of samples that its header says, as on other ranks: resampling may yield one
        more or less. Missing samples are silence."""
        window = np.zeros(samples, np.float32)
        wave = decode_audio(media, self.processor.sampling_rate)[:samples]
        window[: len(wave)] = wave
        return window


class ClipUnitBase(UnitBase):
    """Base class of media units for clips."""

    __slots__ = ()
    kind: MediaKind = "video"


class PiecedClipUnit(ClipUnitBase):
    """Base class of media units for clips that are written in several places, with text between."""

    __slots__ = ()

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each group of the clip's tokens, the text before them, their number, and the text after them."""
        raise NotImplementedError
