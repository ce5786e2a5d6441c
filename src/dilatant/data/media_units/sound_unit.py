"""Variable-length audio: log-mel frames of the sound only, not padded to a window of 30 s."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.unit_base import SoundUnitBase
from dilatant.data.sample import Fingerprinted, Media, MediaMarkup, MediaSize

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


LONGEST_SECONDS = 30
"""Length to which the family's extractor cuts sounds."""


@dataclass(frozen=True, slots=True)
class UsmMelProcessor(Fingerprinted):
    """Log mel spectrogram (HTK's scale) with frames of `frame_length_ms`, one every `hop_length_ms`; half of the first
    frame precedes the sound. Names are those of transformers' `Gemma4AudioFeatureExtractor`."""

    feature_size: int = 128
    sampling_rate: int = 16_000
    frame_length_ms: float = 20.0
    hop_length_ms: float = 10.0
    min_frequency: float = 0.0
    max_frequency: float = 8000.0
    preemphasis: float = 0.0
    preemphasis_htk_flavor: bool = True
    fft_overdrive: bool = False
    input_scale_factor: float = 1.0
    mel_floor: float = 1e-3
    per_bin_mean: tuple[float, ...] | None = None
    per_bin_stddev: tuple[float, ...] | None = None

    @property
    def frame_length(self) -> int:
        """Length of a frame in samples."""
        return round(self.sampling_rate * self.frame_length_ms / 1000)

    @property
    def hop_length(self) -> int:
        """Distance of frames in samples."""
        return round(self.sampling_rate * self.hop_length_ms / 1000)

    @property
    def fft_length(self) -> int:
        """Length of the FFT in samples."""
        return 2 ** math.ceil(math.log2(self.frame_length)) * (2 if self.fft_overdrive else 1)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the processor as transformers' classes read them."""
        return {"feature_extractor_type": "Gemma4AudioFeatureExtractor", **asdict(self)}

    def frames(self, samples: int) -> int:
        """Return the number of complete frames in a sound."""
        return (samples + self.frame_length // 2 - (self.frame_length + 1)) // self.hop_length + 1

    def samples(self, frames: int) -> int:
        """Return the samples of the shortest sound with this number of frames."""
        return (frames - 1) * self.hop_length + self.frame_length + 1 - self.frame_length // 2

    def __call__(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features of a wave [samples]: float32 [frames, feature_size]."""
        length, before = self.frame_length, self.frame_length // 2
        padded = np.pad(wave * np.float32(self.input_scale_factor), (before, 0))
        # One sample more than a frame, as pre-emphasis needs the preceding sample.
        pieces = np.lib.stride_tricks.sliding_window_view(padded, length + 1)[:: self.hop_length]
        if not self.preemphasis:
            frames = pieces[:, :-1]
        elif self.preemphasis_htk_flavor:
            head = pieces[:, :1] * (1.0 - self.preemphasis)
            frames = np.concatenate([head, pieces[:, 1:-1] - self.preemphasis * pieces[:, :-2]], axis=1)
        else:
            frames = pieces[:, 1:] - self.preemphasis * pieces[:, :-1]
        hann = np.hanning(length + 1)[:-1].astype(np.float32)
        power = np.abs(np.fft.rfft(frames * hann, n=self.fft_length))
        filters = _mel_filters(
            self.feature_size, self.fft_length, self.sampling_rate, self.min_frequency, self.max_frequency
        )
        log = np.log(power @ filters + self.mel_floor)
        if self.per_bin_mean is not None:
            log = log - np.array(self.per_bin_mean)
        if self.per_bin_stddev is not None:
            log = log / np.array(self.per_bin_stddev)
        return np.ascontiguousarray(log, np.float32)


@lru_cache(maxsize=8)
def _mel_filters(bins: int, fft_length: int, sampling_rate: int, low: float, high: float) -> NDArray[np.float64]:
    from transformers.audio_utils import mel_filter_bank

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the top filters are empty, as in the family's extractor
        return mel_filter_bank(fft_length // 2 + 1, bins, low, high, sampling_rate, norm=None, mel_scale="htk")


def usm_processor(settings: Mapping[str, Any] | None, mel_bins: int) -> UsmMelProcessor:
    """Make the processor of saved settings, which may include those of images, for `mel_bins`. Raises UserError."""
    given = dict(settings or {})
    if given.get("dither"):
        raise UserError("model.processor: dither would make samples differ from run to run; set it to 0")
    known = {item.name for item in fields(UsmMelProcessor)}
    own = {key: value for key, value in given.items() if key in known and value is not None}
    own |= {key: tuple(own[key]) for key in ("per_bin_mean", "per_bin_stddev") if key in own}
    processor = UsmMelProcessor(**{"feature_size": mel_bins, **own})
    if processor.feature_size != mel_bins:
        raise UserError(
            f"model.processor: feature_size is {processor.feature_size}, but the tower takes {mel_bins} mel bins"
        )
    return processor


@dataclass(frozen=True, slots=True)
class UsmSoundUnit(SoundUnitBase):
    """Media unit for sounds: four frames are one encoder token and one language-model token. Sounds longer than
    `LONGEST_SECONDS` are refused."""

    processor: UsmMelProcessor
    marker: str = "<audio>"
    written: MediaMarkup | None = None

    def frames(self, size: MediaSize) -> int:
        """Return a sound's number of frames, at least one (silence-padded). Raises ValueError if it is too long."""
        # Division may give a rounding error above a whole sample.
        samples = round(size.seconds * self.processor.sampling_rate)
        if samples > LONGEST_SECONDS * self.processor.sampling_rate:
            raise ValueError(f"{size.seconds:.2f} s is longer than the encoder's {LONGEST_SECONDS} s; cut it")
        return max(1, self.processor.frames(samples))

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the numbers of frames that later stages of the encoder need, from the sound's size."""
        frames = self.frames(size)
        return {FRAMES: np.array([[frames, frames]], np.int64)}

    def encoder_tokens(self, size: MediaSize) -> int:
        return -(-self.frames(size) // 4)

    def merged_tokens(self, size: MediaSize) -> int:
        return self.encoder_tokens(size)

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        window = self.decode(media, self.processor.samples(self.frames(size)))
        return {"input_features": self.processor(window), **self.grid(size)}
