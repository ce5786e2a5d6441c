"""Our own processors give what transformers' would, and every medium is decoded as its header promised."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from cases.data_builders import image_bytes, wav_bytes
from dilatant.config import UserError
from dilatant.data.media.image_file import decode_image
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import Pixels, concatenate_inputs
from dilatant.data.media.sound_file import decode_audio, resample
from dilatant.data.media_units.audio_unit import AudioUnit, LogMelProcessor
from dilatant.data.media_units.image_unit import PixelProcessor
from dilatant.data.media_units.processors import (
    HuggingFaceImageProcessor,
    audio_processor,
    clip_settings,
    image_processor,
    pretrained_settings,
)
from dilatant.data.sample import FileSlice, Media, MediaSize
from dilatant.models.core.stage import on_device

SHAPES = [(300, 500), (640, 480), (100, 90), (30, 700), (224, 224), (333, 223)]


def picture(height, width, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "ViT", "Bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_images_equal_those_of_the_familys_processor(family, shape):
    import transformers

    reference = getattr(transformers, f"{family}ImageProcessorPil")()
    mine = image_processor(reference.to_dict(), height=224, width=224)
    assert isinstance(mine, PixelProcessor)
    pixels = picture(*shape)
    expected = reference(images=pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    # Both round once in float32; values lie in [-3, 3].
    np.testing.assert_allclose(mine(pixels)["pixel_values"].normalized(), expected, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_device_normalization_equals_numpy_bit_for_bit(channels):
    """Every byte in every channel; the steps as transformers' processors take them, in float32, one after another."""
    mean, std = [(0.5,), (0.481, 0.458, 0.408)][channels == 3], [(0.5,), (0.269, 0.261, 0.276)][channels == 3]
    grid = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, channels, 1, 1))
    values = np.concatenate([grid, grid[:, :, ::-1]])
    steps = np.float32(values.transpose(0, 2, 3, 1)) * np.float32(1 / 255) - np.array(mean, np.float32)
    expected = (steps / np.array(std, np.float32)).transpose(0, 3, 1, 2)
    assert (Pixels(values, 1 / 255, mean, std).normalized() == expected).all()
    items = [Pixels(values[at : at + 1], 1 / 255, mean, std) for at in range(2)]
    assert (on_device(items, torch.device("cpu")).numpy() == expected).all()


def test_mixed_pixels_and_arrays_join_into_normalized_inputs():
    values = np.full((2, 1, 2, 2), 255, np.uint8)
    inputs = [
        Pixels(values, 1 / 255, (0.5,), (0.5,)),
        Pixels(values, 1.0, (0.0,), (1.0,)),
        np.zeros((1, 1, 2, 2), "f4"),
    ]
    seen = on_device(inputs, torch.device("cpu"))
    assert seen.dtype == torch.float32
    assert seen[:, 0, 0, 0].tolist() == [1, 1, 255, 255, 0]
    assert concatenate_inputs(inputs)[:, 0, 0, 0].tolist() == [1, 1, 255, 255, 0]
    assert isinstance(concatenate_inputs(inputs[:1] * 2), Pixels)
    assert len(concatenate_inputs(inputs[:1] * 2)) == 4


def test_other_families_run_transformers_own_processor(tmp_path):
    from transformers import ConvNextImageProcessorPil

    reference = ConvNextImageProcessorPil()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(reference.to_dict()))
    size = reference.size["shortest_edge"]
    mine = image_processor(str(tmp_path), height=size, width=size)
    assert isinstance(mine, HuggingFaceImageProcessor)
    pixels = picture(300, 500)
    expected = reference(images=pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    assert (mine(pixels)["pixel_values"] == expected).all()


def test_settings_that_a_file_lacks_are_those_of_its_class():
    """ViT resizes bilinearly and CLIP crops, unless the file says otherwise."""
    shared = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    crops = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}, "resample": 3}
    pixels = picture(20, 30)
    for settings in (
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, **shared},
        {"image_processor_type": "CLIPImageProcessor", **crops, **shared},
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}, "resample": 2},
    ):
        made = image_processor(settings, height=8, width=8)(pixels)["pixel_values"]
        theirs = HuggingFaceImageProcessor(json.dumps(settings))(pixels)["pixel_values"]
        np.testing.assert_allclose(
            made.normalized() if isinstance(made, Pixels) else made, theirs, atol=1e-6
        )  # one rounding in float32


@pytest.mark.parametrize(
    "processor",
    [
        PixelProcessor(16, 24),
        PixelProcessor(8, 8, channels=1, resample="nearest"),
        PixelProcessor(32, 32, shortest_edge=40, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), rescale=1 / 128),
    ],
)
def test_saved_image_processor_loads_here_and_in_transformers(tmp_path, processor):
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor.settings))
    pixels = picture(30, 50)[:, :, : processor.channels]
    expected = processor(pixels)["pixel_values"].normalized()
    again = image_processor(str(tmp_path), height=processor.height, width=processor.width, channels=processor.channels)
    assert (again(pixels)["pixel_values"].normalized() == expected).all()
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    values = theirs(images=pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    np.testing.assert_allclose(values, expected, atol=1e-6)  # one rounding in float32


@pytest.mark.parametrize("frames", [100, 104, 3000])
def test_saved_audio_processor_loads_here_and_in_transformers(tmp_path, frames):
    from transformers import AutoFeatureExtractor

    processor = LogMelProcessor(window_frames=frames, mel_bins=40)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor.settings))
    assert audio_processor(str(tmp_path), frames=frames, mel_bins=40) == processor
    theirs = AutoFeatureExtractor.from_pretrained(tmp_path)
    wave = np.random.default_rng(0).standard_normal(processor.window_samples // 2).astype(np.float32) * 0.1
    window = np.zeros((1, processor.window_samples), np.float32)
    window[0, : len(wave)] = wave
    values = theirs(wave, sampling_rate=16000, return_tensors="np")["input_features"]
    if frames % 100:
        assert values.shape == (1, 40, -(-frames // 100) * 100)  # they know windows of whole seconds only
    else:
        np.testing.assert_allclose(values, processor(window)["input_features"], atol=2e-5)  # float32 there


def test_combined_processor_file_loads_and_a_missing_one_raises(tmp_path):
    for read in (
        lambda: image_processor(str(tmp_path), height=8, width=8),
        lambda: audio_processor(str(tmp_path), frames=100, mel_bins=40),
    ):
        with pytest.raises(UserError, match=r"there is no processor in .*: put its preprocessor_config\.json there"):
            read()
    pixels, sound = (
        PixelProcessor(8, 8, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)),
        LogMelProcessor(window_frames=100, mel_bins=40),
    )
    parts = {"image_processor": pixels.settings, "feature_extractor": sound.settings}
    (tmp_path / "processor_config.json").write_text(json.dumps(parts))
    assert image_processor(str(tmp_path), height=8, width=8) == pixels
    assert audio_processor(str(tmp_path), frames=100, mel_bins=40) == sound


def test_of_two_processor_files_transformers_choice_is_read(tmp_path):
    """Transformers prefers what `processor_config.json` holds to the file of one processor."""
    parts = {"image_processor": {"size": 2}, "video_processor": {"fps": 2}}
    for name, content in (
        ("preprocessor_config.json", {"size": 1}),
        ("video_preprocessor_config.json", {"fps": 1}),
        ("processor_config.json", parts),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    assert (pretrained_settings(str(tmp_path)), clip_settings(str(tmp_path))) == ({"size": 2}, {"fps": 2})
    (tmp_path / "processor_config.json").write_text('{"image_seq_length": 4}')
    assert (pretrained_settings(str(tmp_path)), clip_settings(str(tmp_path))) == ({"size": 1}, {"fps": 1})
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"cannot be loaded: preprocessor_config.json holds no object"):
        pretrained_settings(str(tmp_path))


def test_a_processor_unlike_the_encoder_size_is_refused():
    from transformers import SiglipImageProcessorPil

    with pytest.raises(
        UserError, match=r"makes \(1, 3, 224, 224\) of one image, but the encoder takes \(1, 3, 64, 64\)"
    ):
        image_processor(SiglipImageProcessorPil().to_dict(), height=64, width=64)
    with pytest.raises(UserError, match="unknown setting 'sice'; known: channels, height"):
        image_processor({"sice": 3}, height=8, width=8)
    with pytest.raises(UserError, match="unknown resample 'cubic'"):
        image_processor({"resample": "cubic"}, height=8, width=8)
    with pytest.raises(UserError, match="cannot be loaded"):
        image_processor("/no/such/folder", height=8, width=8)
    with pytest.raises(UserError, match="4 channels"):
        image_processor(None, height=8, width=8, channels=4)


def test_grey_and_colour_of_any_mode():
    for mode in ("L", "RGB", "RGBA", "LA"):
        media = Media("image", image_bytes(6, 5, mode=mode), "x")
        assert decode_image(media, 3).shape == (5, 6, 3)
        assert decode_image(media, 1).shape == (5, 6, 1)
    processor = PixelProcessor(5, 6, channels=1, mean=(0.0,), std=(1.0,))
    bytes_seen = processor(decode_image(media, 1))["pixel_values"]
    assert bytes_seen.values.flags.writeable  # torch warns of others
    values = bytes_seen.normalized()
    assert values.shape == (1, 1, 5, 6)
    np.testing.assert_allclose(values[0, 0], decode_image(media, 1)[:, :, 0] / 255, atol=1e-6)


def test_sixteen_bit_greys_keep_their_shades():
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    buffer = io.BytesIO()
    Image.fromarray(deep).save(buffer, "PNG")
    assert (decode_image(Media("image", buffer.getvalue(), "x"), 1)[:, :, 0] == deep >> 8).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_transparent_is_seen_on_white(mode, channels):
    """Black drawing on nothing, as charts and formulas often are: left half drawn, right half clear."""
    image = Image.new("RGBA", (8, 4), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 4))
    buffer = io.BytesIO()
    if mode == "P":
        paletted = Image.new("P", (8, 4), 1)
        paletted.putpalette([0, 0, 0, 0, 0, 0])
        paletted.paste(0, (0, 0, 4, 4))
        paletted.save(buffer, "GIF", transparency=1)
    else:
        image.convert(mode).save(buffer, "TIFF" if mode == "PA" else "PNG")
    pixels = decode_image(Media("image", buffer.getvalue(), "x"), channels)
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 4:] == 255).all()


def test_half_transparent_colours_are_mixed_with_white():
    buffer = io.BytesIO()
    Image.new("RGBA", (2, 2), (100, 0, 200, 51)).save(buffer, "PNG")
    pixels = decode_image(Media("image", buffer.getvalue(), "x"), 3)
    # A fifth of the colour and four fifths of white, rounded.
    assert np.abs(pixels[0, 0].astype(int) - [224, 204, 244]).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_and_sizes_say_so(orientation):
    """As cameras number them: the first row is top, top, bottom, bottom, left, right, right, left."""
    image = Image.fromarray(np.tile(np.uint8([[0, 85], [170, 255]]).repeat(8, 0).repeat(16, 1)[..., None], 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=100)
    media = Media("image", buffer.getvalue(), "x")
    size = media_size(media)
    assert (size.width, size.height) == ((32, 16) if orientation < 5 else (16, 32))
    pixels = decode_image(media, 1)[:, :, 0]
    assert pixels.shape == (size.height, size.width)
    shades = pixels[4 :: size.height // 2, 4 :: size.width // 2].astype(int)
    upright = {1: [[0, 85], [170, 255]], 2: [[85, 0], [255, 170]], 3: [[255, 170], [85, 0]],
               4: [[170, 255], [0, 85]], 5: [[0, 170], [85, 255]], 6: [[170, 0], [255, 85]],
               7: [[255, 85], [170, 0]], 8: [[85, 255], [0, 170]]}[orientation]  # fmt: skip
    assert np.abs(shades - upright).max() < 9  # JPEG rounds


def test_sizes_of_images_do_not_decode_them():
    whole = image_bytes(64, 48)
    size = media_size(Media("image", whole[:64], "x"))  # the header is there, the pixels are not
    assert (size.width, size.height) == (64, 48)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16000, 2), (44100, 2), (48000, 1)])
def test_sounds_of_any_form_have_the_promised_length(form, rate, channels):
    media = Media("audio", wav_bytes(0.73, rate, channels, form), "x")
    seconds = media_size(media).seconds
    # MP3 pads to whole frames of 1152 samples.
    assert seconds == pytest.approx(0.73, abs=3 * 1152 / rate if form == "MP3" else 1 / rate)
    wave = decode_audio(media, 16000)
    assert wave.dtype == np.float32
    assert abs(len(wave) - seconds * 16000) <= 1
    # The tone has an amplitude of 0.3, so a mean square of 0.045; lossy forms keep it within 5 %.
    assert float((wave**2).mean()) == pytest.approx(0.045, rel=0.05)


@pytest.mark.parametrize(
    ("rate", "to_rate"), [(8000, 16000), (44100, 16000), (48000, 16000), (16000, 8000), (22050, 16000)]
)
def test_resampling_keeps_only_the_band_both_rates_share(rate, to_rate):
    time = np.arange(rate) / rate
    limit = min(rate, to_rate) / 2
    kept = np.sin(2 * np.pi * 0.8 * limit * time).astype(np.float32)
    out = resample(kept, rate, to_rate)
    expected = np.sin(2 * np.pi * 0.8 * limit * np.arange(len(out)) / to_rate)
    middle = slice(len(out) // 10, -len(out) // 10)
    # The filter's pass band is flat to about 0.1 %.
    np.testing.assert_allclose(out[middle], expected[middle], atol=2e-3)
    if rate > to_rate:
        removed = resample(np.sin(2 * np.pi * 1.1 * limit * time).astype(np.float32), rate, to_rate)
        assert np.abs(removed[middle]).max() < 2e-3


def test_resampling_a_short_or_odd_wave_does_not_fail():
    for length in (1, 2, 159, 160, 161, 441):
        assert abs(len(resample(np.ones(length, np.float32), 44100, 16000)) - length * 160 / 441) <= 1


def test_log_mel_features_equal_whispers():
    from transformers import WhisperFeatureExtractor

    reference = WhisperFeatureExtractor(feature_size=80)
    wave = np.random.default_rng(0).standard_normal(16000 * 3).astype(np.float32) * 0.1
    windows = np.zeros((1, 480000), np.float32)
    windows[0, : len(wave)] = wave
    expected = reference(wave, sampling_rate=16000, return_tensors="np")["input_features"]
    mine = audio_processor(reference.to_dict(), frames=3000, mel_bins=80)(windows)["input_features"]
    assert mine.shape == expected.shape == (1, 80, 3000)
    # The reference works in float32 where torch is present, and values are of order one.
    np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_window_features_do_not_depend_on_neighbor_windows():
    processor = LogMelProcessor(window_frames=50, mel_bins=16)
    noise = np.random.default_rng(0).standard_normal((2, processor.window_samples)).astype(np.float32)
    windows = noise * np.array([[1.0], [1e-4]], np.float32)
    together = processor(windows)["input_features"]
    alone = [processor(window[None])["input_features"] for window in windows]
    assert (together == np.concatenate(alone)).all()


def test_a_shorter_window_is_cut_from_the_same_features():
    settings = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 80,
        "n_fft": 400,
        "hop_length": 160,
    }
    processor = audio_processor(settings, frames=100, mel_bins=80)
    assert processor.window_samples == 16000
    unit = AudioUnit("audio", 9, 50, processor)
    features = unit.process(Media("audio", wav_bytes(2.5), "x"), MediaSize(seconds=2.5))["input_features"]
    assert features.shape == (3, 80, 100)
    with pytest.raises(UserError, match="makes 80 mel bins, but the encoder takes 128"):
        audio_processor(settings, frames=100, mel_bins=128)
    with pytest.raises(UserError, match="unknown setting 'bins'"):
        audio_processor({"bins": 3}, frames=100, mel_bins=80)
    with pytest.raises(UserError, match="SpeechT5FeatureExtractor is not supported"):
        audio_processor({"feature_extractor_type": "SpeechT5FeatureExtractor"}, frames=100, mel_bins=80)


def test_windows_are_counted_alike_before_and_after_resampling():
    unit = AudioUnit("audio", 9, 5, LogMelProcessor(window_frames=10))
    for rate in (8000, 11025, 16000, 22050, 44100):
        for samples in range(rate // 10 - 2, rate // 10 + 3):
            media = Media("audio", wav_bytes(samples / rate, rate), "x")
            size = media_size(media)
            assert len(unit.process(media, size)["input_features"]) * 5 == unit.encoder_tokens(size)
    # A third of a sample more than 30 s: one window, although resampling rounds up to a sample more.
    unit = AudioUnit("audio", 9, 5, LogMelProcessor(window_frames=3000, mel_bins=8))
    media = Media("audio", wav_bytes(30 + 1 / 44100, 44100), "x")
    size = media_size(media)
    assert len(unit.process(media, size)["input_features"]) * 5 == unit.encoder_tokens(size)


def test_a_sound_of_whole_windows_takes_no_window_more():
    # 161 windows of 0.1 s; as fractions they are 161.00000000000003.
    unit = AudioUnit("audio", 9, 5, LogMelProcessor(window_frames=10))
    assert unit.encoder_tokens(MediaSize(seconds=128_800 / 8000)) == 161 * 5
    assert unit.encoder_tokens(MediaSize(seconds=128_801 / 8000)) == 162 * 5


def test_a_slice_of_a_file_reads_like_the_file(tmp_path):
    inner = image_bytes(30, 20)
    (tmp_path / "x").write_bytes(b"before" + inner + b"after")
    media = Media("image", FileSlice(tmp_path / "x", 6, len(inner)), "x")
    assert (decode_image(media, 3) == decode_image(Media("image", inner, "x"), 3)).all()
    sound = wav_bytes()
    (tmp_path / "y").write_bytes(b"before" + sound + b"after")
    media = Media("audio", FileSlice(tmp_path / "y", 6, len(sound)), "y")
    assert (decode_audio(media, 16000) == decode_audio(Media("audio", sound, "y"), 16000)).all()
