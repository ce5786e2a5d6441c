"""Variable-length audio: log-mel frames of the sound only, not padded to a window of 30 s."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.unit_base import SoundUnitBase
from dilatant.data.sample import Media, MediaMarkup, MediaSize

FRAMES = "feature_lens"
"""Encoder keyword for the frames of every sound, without and with trailing frames: int64 [sounds, 2]."""
SHORTEST = 3
"""Minimum frames of a sound: they give two encoder tokens, and those one language-model token."""


@dataclass(frozen=True, slots=True)
class SoundUnit(SoundUnitBase):
    """Media unit for sounds: half as many encoder tokens as frames, and a quarter as many language-model tokens.

    longest: most frames that the encoder has positions for, None for no limit; longer sounds are refused. trailing:
    frames after the end that the encoder reads, for families that compute a padded window.
    """

    processor: LogMelProcessor
    longest: int | None = None
    trailing: int = 0
    marker: str = "<audio>"
    written: MediaMarkup | None = None

    def frames(self, size: MediaSize) -> int:
        """Return the number of frames of a sound. Raises ValueError if it is too long."""
        # Division may give a rounding error above a whole frame.
        frames = math.ceil(size.seconds * self.processor.sampling_rate / self.processor.hop_length - 1e-6)
        if self.longest is not None and frames > self.longest:
            seconds = self.longest * self.processor.hop_length / self.processor.sampling_rate
            raise ValueError(f"{size.seconds:.2f} s is longer than the encoder's {seconds:g} s; cut it")
        return max(SHORTEST, frames)

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the numbers of frames that later stages of the encoder need, from the sound's size."""
        frames = self.frames(size)
        return {FRAMES: np.array([[frames, self._with_trailing(frames)]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return (self.frames(size) - 1) // 2 + 1

    def merged_tokens(self, size: MediaSize) -> int:
        return self.encoder_tokens(size) // 2

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        # By the header, as on other ranks; resampling may yield one sample more or less.
        frames = self.frames(size)
        features = self.features(decode_audio(media, self.processor.sampling_rate), frames)
        return {"input_features": features, **self.grid(size)}

    def features(self, wave: NDArray[np.float32], frames: int) -> NDArray[np.float32]:
        """Return a wave's features, float32 [frames + trailing, mel bins], as in a window padded with silence."""
        processor, wanted = self.processor, self._with_trailing(frames)
        # The padding exceeds the reach of any used frame, because the features mirror the signal at the window's end.
        length = wanted if wanted == self.longest else wanted + 4
        window = np.zeros(length * processor.hop_length, np.float32)
        kept = min(len(wave), frames * processor.hop_length)
        window[:kept] = wave[:kept]
        made = replace(processor, window_frames=length)(window[None])["input_features"][0]
        return np.ascontiguousarray(made[:, :wanted].T)

    def _with_trailing(self, frames: int) -> int:
        return frames + self.trailing if self.longest is None else min(frames + self.trailing, self.longest)
