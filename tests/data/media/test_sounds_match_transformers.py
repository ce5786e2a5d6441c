"""Sounds of any length: frames as transformers makes them of a padded window, and their number told from the header."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from transformers import WhisperFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from dilatant.config.errors import UserError
from dilatant.data.media.media_header import media_size
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.sound_unit import FRAMES, SoundUnit, UsmMelProcessor, UsmSoundUnit, usm_processor
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


@pytest.mark.parametrize("seconds", [0.02, 0.11, 1.0, 2.345])
def test_gemma4s_frames_of_a_sound_are_those_of_its_extractor(tmp_path: Path, seconds: float) -> None:
    wave = np.random.default_rng(1).normal(0, 0.1, round(16000 * seconds)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", wave, 16000, subtype="FLOAT")
    options = {"preemphasis": 0.97, "per_bin_mean": [0.1] * 16, "per_bin_stddev": [2.0] * 16, "feature_size": 16}
    for settings in ({"feature_size": 16}, options, {**options, "preemphasis_htk_flavor": False}):
        unit = UsmSoundUnit("audio", 9, usm_processor(settings, 16))
        made = unit.process(Media("audio", tmp_path / "a.wav", "a"), MediaSize(seconds=len(wave) / 16000))
        theirs = Gemma4AudioFeatureExtractor(**settings)([wave], return_tensors="np")
        there = theirs["input_features_mask"][0]
        # The same operations on frames that are cut otherwise.
        np.testing.assert_allclose(made["input_features"], theirs["input_features"][0][there], atol=1e-5, rtol=0)
        rows = unit.merged_tokens(MediaSize(seconds=seconds))
        assert rows == there[::2][::2].sum()


def test_gemma4_takes_the_shortest_sound_and_refuses_long_ones() -> None:
    unit = UsmSoundUnit("audio", 9, UsmMelProcessor())
    assert unit.merged_tokens(MediaSize(seconds=0.001)) == 1
    assert unit.merged_tokens(MediaSize(seconds=30)) == 750
    with pytest.raises(ValueError, match="longer"):
        unit.merged_tokens(MediaSize(seconds=30.1))
    with pytest.raises(UserError, match="dither"):
        usm_processor({"dither": 0.1}, 128)
    with pytest.raises(UserError, match="128 mel bins"):
        usm_processor({"feature_size": 80}, 128)
