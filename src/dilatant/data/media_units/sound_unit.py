"""How encoders of sounds of any length see them: log-mel frames of the sound alone, not of a window of 30 s."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.sample import Media, MediaKind, MediaSize, Written, digest_of

FRAMES = "feature_lens"
"""The keyword of an encoder for the frames of every sound, and those that come with them: int64 [sounds, 2]."""
SHORTEST = 3
"""Frames of a sound, of which two rows of an encoder are made, and of these one of the text."""


@dataclass(frozen=True, slots=True)
class SoundUnit:
    """A `MediaUnit`: a sound is half as many encoder tokens as frames, and a quarter in the text.

    longest: frames of a sound that the encoder knows positions for; longer ones are refused. None for any. trailing:
    frames behind the end that the encoder looks at, where the family computes a padded window.
    """

    name: str
    placeholder_id: int
    processor: LogMelProcessor
    longest: int | None = None
    trailing: int = 0
    marker: str = "<audio>"
    written: Written | None = None
    merge: Literal["placeholder", "prepend"] = "placeholder"
    kind: MediaKind = "audio"

    @property
    def fingerprint(self) -> str:
        parts = (self.name, self.placeholder_id, self.longest, self.trailing, self.marker, self.written,
                 self.processor.fingerprint)  # fmt: skip
        return digest_of(parts)

    def frames(self, size: MediaSize) -> int:
        """Of a sound. Raises ValueError for one that is too long."""
        # A hair above a whole frame comes from dividing.
        frames = math.ceil(size.seconds * self.processor.sampling_rate / self.processor.hop_length - 1e-6)
        if self.longest is not None and frames > self.longest:
            seconds = self.longest * self.processor.hop_length / self.processor.sampling_rate
            raise ValueError(f"{size.seconds:.2f} s is longer than the encoder's {seconds:g} s; cut it")
        return max(SHORTEST, frames)

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """What later stages of the encoder know of a sound."""
        frames = self.frames(size)
        return {FRAMES: np.array([[frames, self._with_trailing(frames)]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return (self.frames(size) - 1) // 2 + 1

    def merged_tokens(self, size: MediaSize) -> int:
        return self.encoder_tokens(size) // 2

    def process(self, media: Media) -> dict[str, EncoderInput]:
        # From the header, as everybody else counts; resampling may end a sample earlier or later.
        size = media_size(media)
        frames = self.frames(size)
        features = self.features(decode_audio(media, self.processor.sampling_rate), frames)
        return {"input_features": features, **self.grid(size)}

    def features(self, wave: NDArray[np.float32], frames: int) -> NDArray[np.float32]:
        """float32 [frames and trailing ones, mel bins] of a wave, as of a window that goes on in silence."""
        processor, wanted = self.processor, self._with_trailing(frames)
        # Two frames more than any that is used reaches: the end of the window mirrors what is before it.
        length = wanted if wanted == self.longest else wanted + 4
        window = np.zeros(length * processor.hop_length, np.float32)
        kept = min(len(wave), frames * processor.hop_length)
        window[:kept] = wave[:kept]
        made = replace(processor, window_frames=length)(window[None])["input_features"][0]
        return np.ascontiguousarray(made[:, :wanted].T)

    def _with_trailing(self, frames: int) -> int:
        return frames + self.trailing if self.longest is None else min(frames + self.trailing, self.longest)
