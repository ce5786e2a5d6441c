"""Sounds of any file: what the index says of their length is what decoding gives."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
import soundfile

from dilatant.data.errors import MediaError
from dilatant.data.media.media_header import media_size
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.sample import Media

RATE = 16000


def wave(seconds: float) -> np.ndarray:
    """Noise, whose MP3 has frames of many lengths."""
    return (np.random.default_rng(0).standard_normal(round(seconds * RATE)) * 0.1).astype(np.float32)


def mp3(seconds: float = 3.7) -> bytes:
    """With a header (Xing's) that counts its frames."""
    buffer = io.BytesIO()
    soundfile.write(buffer, wave(seconds), RATE, format="MP3", compression_level=0.5, bitrate_mode="VARIABLE")
    data = buffer.getvalue()
    assert b"Xing" in data[:64] or b"Info" in data[:64]
    return data


def without_header(data: bytes) -> bytes:
    """What follows the frame that counts the others."""
    return data[data.index(data[:2], 4) :]


def with_tag(data: bytes) -> bytes:
    size = 3000
    head = b"ID3\4\0\0" + bytes([0, 0, size >> 7, size & 127])
    return head + bytes(size) + data


@pytest.fixture(params=["PyAV", "libsndfile alone"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "PyAV":
        pytest.importorskip("av")
    else:
        monkeypatch.setitem(sys.modules, "av", None)
    return request.param


def lengths(data: bytes) -> tuple[float, float]:
    """Seconds by the size and of the decoded sound."""
    media = Media("audio", data, "x")
    return media_size(media).seconds, len(decode_audio(media, RATE)) / RATE


def test_an_mp3_with_a_header_is_as_long_as_that_says(reader: str) -> None:
    for data in (mp3(), with_tag(mp3()), mp3() + b"TAG" + bytes(125)):
        assert lengths(data) == pytest.approx((3.7, 3.7), abs=1 / RATE)


@pytest.mark.parametrize("damage", ["none", "tag before", "tags behind", "garbage behind", "cut", "header of another"])
def test_an_mp3_is_as_long_as_the_frames_in_it(damage: str, reader: str) -> None:
    """Where it has no header, or one of a longer file: libsndfile, which reads no more than it reckons with, is not
    trusted then."""
    data = without_header(mp3())
    expected = 3.7
    if damage == "tag before":
        data = with_tag(data)
    elif damage == "tags behind":
        data += b"APETAGEX" + bytes(500) + b"TAG" + bytes(125)
    elif damage == "garbage behind":
        data += bytes(range(256)) * 8
    elif damage == "cut":
        data, expected = data[: len(data) // 2], 1.85
    elif damage == "header of another":
        whole = mp3()
        data, expected = whole[: len(whole) // 2], 1.85
    if reader != "PyAV":
        with pytest.raises(MediaError, match=r"no MP3 that counts its frames.*dilatant\[video\]"):
            lengths(data)
        return
    said, decoded = lengths(data)
    assert said == pytest.approx(decoded, abs=1 / RATE)
    # A frame of 36 ms begins the decoder and one ends it; noise has frames of unlike lengths.
    assert decoded == pytest.approx(expected, abs=0.2)


def through_av(form: str, codec: str, seconds: float = 3.0, **options: Any) -> bytes:
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=48000, layout="stereo")
        stream.codec_context.format = "fltp"
        both = np.stack([0.4 * np.sin(np.arange(round(seconds * 48000)) * 0.05)] * 2).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = 48000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("form", "codec"), [("ipod", "aac"), ("adts", "aac"), ("mp4", "aac"), ("matroska", "ac3"), ("mpegts", "aac")]
)
def test_what_libsndfile_does_not_know_is_read_by_pyav(form: str, codec: str) -> None:
    data = through_av(form, codec)
    said, decoded = lengths(data)
    assert said == pytest.approx(decoded, abs=1 / RATE)
    assert decoded == pytest.approx(3.0, abs=0.04)  # two packets of 1,024 samples or one of 1,536
    middle = decode_audio(Media("audio", data, "x"), 48000)[48000:96000]
    assert np.abs(middle).max() == pytest.approx(0.4, rel=0.1)


def test_a_window_of_sound_stays_one_window_as_m4a() -> None:
    """Its last packet is longer than the sound; the header says where that ends."""
    assert lengths(through_av("ipod", "aac", seconds=2.0)) == (2.0, 2.0)


def test_without_pyav_the_message_says_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = through_av("ipod", "aac")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"'a.m4a' is no whole WAV, FLAC, OGG .*MP3.*dilatant\[video\]"):
        media_size(Media("audio", data, "a.m4a"))


@pytest.mark.parametrize("kept", [0.95, 0.5, 0.1])
def test_a_sound_that_is_cut_off_is_refused_by_pyav_too(kept: float) -> None:
    data = through_av("ipod", "aac", seconds=8.0)
    moov = data.index(b"moov") - 4
    assert moov > data.index(b"mdat")  # a file with its index behind the sound, which is blanked here
    start = data.index(b"mdat") + 4
    blank = data[: start + round((moov - start) * kept)] + bytes(moov - start - round((moov - start) * kept))
    with pytest.raises(MediaError, match=r"cut off|cannot be read"):
        decode_audio(Media("audio", blank + data[moov:], "x"), RATE)


def test_text_and_pictures_are_no_sound(reader: str) -> None:
    for data in (b"WEBVTT\n\n00:00.000 --> 00:01.000\nhello\n" * 9, b"no sound at all" * 99, b""):
        with pytest.raises(MediaError):
            media_size(Media("audio", data, "x"))
