"""Sounds of any length: frames as transformers makes them of a padded window, and their number told from the header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from dilatant.data.media.media_header import media_size
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.processed_unit import ProcessedSoundUnit
from dilatant.data.media_units.processors import HuggingFaceSoundProcessor
from dilatant.data.media_units.sound_unit import FRAMES, SoundUnit
from dilatant.data.sample import Media, MediaSize


@pytest.mark.parametrize("samples", [300, 1600, 16001, 24_000, 79_990, 80_000])
@pytest.mark.parametrize("trailing", [0, 2])
def test_frames_are_those_of_a_window_of_five_seconds(samples: int, trailing: int, tmp_path: Path) -> None:
    wave = np.random.default_rng(samples).normal(0, 0.1, samples).astype(np.float32)
    soundfile.write(tmp_path / "sound.wav", wave, 16000, subtype="FLOAT")
    unit = SoundUnit("audio", 9, LogMelProcessor(mel_bins=20), longest=500, trailing=trailing)
    media = Media("audio", tmp_path / "sound.wav", "sound")
    made = unit.process(media, media_size(media))
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=5)
    theirs = extractor(wave, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    frames, given = made[FRAMES][0]
    assert frames == max(3, int(theirs["attention_mask"].sum()))
    assert given == min(frames + trailing, 500)
    # Theirs is of float32 in another library.
    np.testing.assert_allclose(made["input_features"], theirs["input_features"][0, :, :given].T, atol=2e-4)
    size = media_size(media)
    np.testing.assert_array_equal(unit.grid(size)[FRAMES], made[FRAMES])
    rows = (int(frames) - 1) // 2 + 1  # as the towers of Qwen say of their outputs
    assert (unit.encoder_tokens(size), unit.merged_tokens(size)) == (rows, (rows - 2) // 2 + 1)


def test_header_refuses_a_sound_longer_than_the_encoder_limit() -> None:
    with pytest.raises(ValueError, match=r"31.00 s is longer than the encoder's 30 s"):
        SoundUnit("audio", 9, LogMelProcessor(), longest=3000).encoder_tokens(MediaSize(seconds=31))


@dataclass(frozen=True)
class QuarterOfFrames:
    """Counts the tokens of Gemma 4's sounds."""

    def __call__(self, item: Mapping[str, NDArray]) -> tuple[int, int]:
        rows = int(item["input_features_mask"][:, ::2][:, ::2].sum())
        return rows, rows


def test_a_sound_whose_end_its_own_processor_drops_is_refused() -> None:
    """Gemma 4's extractor cuts sounds after 30 s without a word."""
    extractor = HuggingFaceSoundProcessor('{"feature_extractor_type": "Gemma4AudioFeatureExtractor"}', "gemma4")
    unit = ProcessedSoundUnit("audio", 9, extractor, QuarterOfFrames())
    assert unit.encoder_tokens(MediaSize(seconds=30)) == 750
    with pytest.raises(ValueError, match=r"30.50 s is longer than its processor takes"):
        unit.encoder_tokens(MediaSize(seconds=30.5))
