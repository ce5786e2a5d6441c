"""Fixed-window audio: log-mel features in as many windows as a sound needs (Whisper)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.pixels import EncoderInput
from dilatant.data.media_units.unit_base import SoundUnitBase
from dilatant.data.sample import Fingerprinted, Media, MediaMarkup, MediaSize


@dataclass(frozen=True, slots=True)
class LogMelProcessor(Fingerprinted):
    """Whisper's features: log10 of a Slaney mel spectrogram, at most 8 below its maximum, scaled to about [-1, 1].

    A window has `window_frames` frames, one every `hop_length` samples.
    """

    window_frames: int = 3000
    mel_bins: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    fft_length: int = 400

    @property
    def window_samples(self) -> int:
        return self.window_frames * self.hop_length

    def __call__(self, windows: NDArray[np.float32]) -> Mapping[str, NDArray]:
        """Return `input_features`: float32 [rows, mel_bins, window_frames]."""
        # One window at a time: a spectrogram takes 20 MB.
        return {"input_features": np.stack([self._log_mel(window) for window in windows])}

    def _log_mel(self, window: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features of one window: float32 [mel_bins, window_frames]. The extractor of transformers gives the
        same values but imports torch, which data workers avoid."""
        padded = np.pad(window.astype(np.float64), self.fft_length // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.fft_length)
        frames = frames[: self.window_samples : self.hop_length]
        hann = np.hanning(self.fft_length + 1)[:-1]
        power = np.abs(np.fft.rfft(frames * hann)) ** 2
        mel = power @ _mel_filters(self.mel_bins, self.fft_length, self.sampling_rate)
        log = np.log10(np.maximum(mel, 1e-10))
        log = np.maximum(log, log.max() - 8.0)
        return np.ascontiguousarray(((log + 4.0) / 4.0).T.astype(np.float32))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the processor as transformers' classes read them."""
        return {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": self.mel_bins,
            "sampling_rate": self.sampling_rate,
            "hop_length": self.hop_length,
            "n_fft": self.fft_length,
            # transformers only has windows of whole seconds; the exact window is saved in addition.
            "chunk_length": -(-self.window_samples // self.sampling_rate),
            "n_samples": self.window_samples,
            "nb_max_frames": self.window_frames,
            "padding_value": 0.0,
        }


@lru_cache(maxsize=8)
def _mel_filters(bins: int, fft_length: int, sampling_rate: int) -> NDArray[np.float64]:
    """Return triangular filters of equal area on Slaney's mel scale: [fft_length // 2 + 1, bins]."""
    from transformers.audio_utils import mel_filter_bank

    return mel_filter_bank(
        fft_length // 2 + 1, bins, 0.0, sampling_rate / 2, sampling_rate, norm="slaney", mel_scale="slaney"
    )


@dataclass(frozen=True, slots=True)
class AudioUnit(SoundUnitBase):
    """Media unit for an encoder with a fixed window: a longer sound takes several rows, a shorter one is zero-padded.

    tokens_per_window: tokens that the encoder processes. merged_per_window: tokens that reach the language model, fewer
    if the projector pools; None for all.
    """

    tokens_per_window: int
    processor: LogMelProcessor
    merged_per_window: int | None = None
    marker: str = "<audio>"
    merge: Literal["placeholder", "prepend"] = "placeholder"
    written: MediaMarkup | None = None

    def windows(self, size: MediaSize) -> int:
        """Return the number of encoder rows of one item."""
        samples = size.seconds * self.processor.sampling_rate
        # Seconds are a quotient of integers, so a rounding error above a full window is ignored.
        return max(1, math.ceil(samples / self.processor.window_samples - 1e-6))

    def encoder_tokens(self, size: MediaSize) -> int:
        return self.windows(size) * self.tokens_per_window

    def merged_tokens(self, size: MediaSize) -> int:
        each = self.tokens_per_window if self.merged_per_window is None else self.merged_per_window
        return self.windows(size) * each

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        rows, window = self.windows(size), self.processor.window_samples
        return dict(self.processor(self.decode(media, rows * window).reshape(rows, window)))
