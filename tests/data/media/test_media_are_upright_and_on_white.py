"""One rule for all formats: upright and on white, in the sizes of headers and in what is decoded."""

from __future__ import annotations

import io
import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence, features

from cases.data_builders import small_encoding
from dilatant.data.errors import MediaError, SampleError
from dilatant.data.media.clip import decode_clip
from dilatant.data.media.image_file import check_pixels, decode_image
from dilatant.data.media.media_header import media_size
from dilatant.data.media_units.frame_choice import moments
from dilatant.data.media_units.native_clip_unit import NativeClipUnit
from dilatant.data.media_units.native_image_unit import GRID, NativeImageUnit, PatchProcessor
from dilatant.data.sample import Media, MediaMarkup, MediaSize, Sample, Turn
from dilatant.data.text.encode import encode_sample, find_problems

# What a viewer does with stored pixels, by the definition of EXIF's orientations.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}
FORMS = ("JPEG", "TIFF", "PNG", "PNG after its pixels", "WEBP", "MPO", "AVIF")


def corners() -> np.ndarray:
    """Four colours in blocks that lossy codecs keep apart, wider than high."""
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16, :32], pixels[:16, 32:], pixels[16:, :32] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    return pixels


def encoded(images: list[Image.Image], form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    more: dict[str, Any] = {"save_all": True, "append_images": images[1:]} if len(images) > 1 else {}
    images[0].save(buffer, form, **more, **options)
    return buffer.getvalue()


def with_exif_at_the_end(png: bytes) -> bytes:
    """A PNG with its eXIf chunk moved behind the pixels, where it may be as well."""
    at = png.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(png[at : at + 4], "big")
    return png[:at] + png[end:-12] + png[at:end] + png[-12:]


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_upright_in_its_size_and_its_pixels(form: str, orientation: int) -> None:
    if form == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(corners())
    images = [image, image] if form == "MPO" else [image]
    data = encoded(images, form.split()[0], exif=exif)
    if "after" in form:
        data = with_exif_at_the_end(data)
    media = Media("image", data, "x")
    expected = UPRIGHT[orientation](corners())
    pixels = decode_image(media, 3)
    size = media_size(media)
    assert (size.height, size.width) == pixels.shape[:2] == expected.shape[:2]
    assert (np.abs(pixels.astype(int) - expected) > 60).mean() < 0.1  # edges between blocks are smeared


def test_damaged_exif_is_no_reason_to_refuse_an_image() -> None:
    for exif in (b"Exif\0\0nothing", b"Exif\0\0MM\0*\xff\xff\xff\xff", b""):
        media = Media("image", encoded([Image.fromarray(corners())], "PNG", exif=exif), "x")
        assert decode_image(media, 3).shape == (32, 64, 3)
        assert (media_size(media).width, media_size(media).height) == (64, 32)


def test_no_program_is_started_for_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    eps = encoded([Image.fromarray(corners())], "EPS")
    pdf = encoded([Image.fromarray(corners())], "PDF")
    for data in (eps, pdf, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        for read in (media_size, lambda media: decode_image(media, 3)):
            with pytest.raises(MediaError, match=r"no image in a known format \(JPEG, PNG"):
                read(Media("image", data, "x.png"))
        with suppress(MediaError):
            media_size(Media("video", data, "x.png"))
    assert not (tmp_path / "started").exists()


def test_an_image_unlike_its_header_size_is_refused() -> None:
    with pytest.raises(MediaError, match="'x' has 64 x 32 pixels, but its header says 32 x 64"):
        check_pixels(Media("image", b"", "x"), corners(), (32, 64))


@dataclass(frozen=True, slots=True)
class OtherUnit(NativeImageUnit):
    """An encoder's view whose pixels have another grid than headers say."""

    def process(self, media: Media, size: MediaSize) -> dict[str, Any]:
        made = NativeImageUnit.process(self, media, size)
        return {**made, GRID: np.array(made[GRID])[:, [0, 2, 1]]}


def test_a_decoded_grid_unlike_the_index_is_a_sample_error() -> None:
    image = Media("image", encoded([Image.new("RGB", (280, 56))], "PNG"), "wide.png")
    turns = (Turn("user", (image, "What?")), Turn("assistant", ("Red.",)))
    encoding = small_encoding(units=(OtherUnit("vision", 300, PatchProcessor()),))
    with pytest.raises(SampleError, match=r"^7: image 'wide.png' decodes to image_grid_thw .*header says"):
        encode_sample(Sample("7", turns), encoding)
    assert len(find_problems(Sample("7", turns), encoding, deep=True)) == 1


def moving(form: str, duration: list[int], mode: str = "RGBA", **options: Any) -> Media:
    """An animation of a red square that grows on a clear ground."""
    frames = []
    for number in range(len(duration)):
        frame = Image.new("RGBA", (40, 20))
        frame.paste((255, 0, 0, 255), (0, 0, 4 + 4 * number, 8))
        frames.append(frame.convert(mode))
    lossless = {"lossless": True} if form == "WEBP" else {}
    disposal = 1 if form == "PNG" else 2  # to the ground
    return Media("video", encoded(frames, form, duration=duration, disposal=disposal, **lossless, **options), form)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_a_clear_animation_is_seen_on_white(form: str) -> None:
    media = moving(form, [100] * 4)
    for number, pixels in enumerate(decode_clip(media, range(4), lambda frame: frame)):
        expected = np.full((20, 40, 3), 255, np.uint8)
        expected[:8, : 4 + 4 * number] = (255, 0, 0)
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_an_animation_is_upright(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    media = moving(form, [100] * 3, exif=exif)
    size = media_size(media)
    (pixels,) = decode_clip(media, [1], lambda frame: frame)
    assert (size.height, size.width) == pixels.shape[:2] == (40, 20)
    assert pixels[:8, 12:].tolist() == [[[255, 0, 0]] * 8] * 8  # the upper right


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_animation_lasts_as_long_as_its_frames(form: str) -> None:
    if form == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    waits = [100, 2000, 500, 0 if form == "GIF" else 300, 70]
    media = moving(form, waits, mode="RGB" if form == "AVIF" else "RGBA")
    size = media_size(media)
    shown = [wait or 100 for wait in waits]  # a frame of no time is shown for 0.1 s
    assert size.frames == 5
    assert size.seconds == pytest.approx(sum(shown) / 1000)
    starts = np.cumsum([0, *shown[:-1]]) / 1000
    np.testing.assert_allclose(moments(size, np.arange(5)), starts, atol=1e-9)


def test_frames_are_counted_as_pillow_counts_them() -> None:
    """With blocks between the pictures that say nothing of time."""
    for comment in (b"", b"x" * 1000):
        media = moving("GIF", [100, 200, 300], comment=comment)
        assert isinstance(media.source, bytes)
        with Image.open(io.BytesIO(media.source)) as image:
            theirs = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
        assert media_size(media).seconds == sum(theirs) / 1000 == 0.6
        assert media_size(media).frames == 3


def test_the_picture_for_viewers_without_animation_is_no_frame() -> None:
    still, *frames = [Image.new("RGB", (16, 16), colour) for colour in ("black", "red", "lime")]
    media = Media("video", encoded([still, *frames], "PNG", duration=200, default_image=True), "x")
    assert (media_size(media).frames, media_size(media).seconds) == (2, 0.4)
    (first,) = decode_clip(media, [0], lambda frame: frame)
    assert first[0, 0].tolist() == [255, 0, 0]


def test_an_animation_with_endless_frames_is_refused() -> None:
    data = moving("PNG", [100] * 3).source
    assert isinstance(data, bytes)
    at = data.index(b"acTL") + 4
    head = b"acTL" + (1 << 30).to_bytes(4, "big") + data[at + 4 : at + 8]
    hostile = data[: at - 4] + head + zlib.crc32(head).to_bytes(4, "big") + data[at + 12 :]
    with pytest.raises(MediaError, match="promises 1,000,001 frames"):
        media_size(Media("video", hostile, "x"))


def video(path: Path, stamps: list[int], codec: str = "mpeg4", **options: Any) -> Path:
    """Frames of four colours at these milliseconds."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream(codec, rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        tick = 100 if path.suffix == ".avi" else 1  # which knows no time stamps, but a rate alone
        stream.codec_context.time_base = Fraction(tick, 1000)
        for stamp in stamps:
            frame = av.VideoFrame.from_ndarray(corners(), format="rgb24")
            frame.pts, frame.time_base = stamp // tick, Fraction(tick, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


MATRICES = [(1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1),
            (0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)]  # fmt: skip
"""(a, b, c, d) of which (x, y) is shown at (ax + cy, bx + dy), in the order of EXIF's orientations."""


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_video_is_upright_by_its_display_matrix(orientation: int, tmp_path: Path) -> None:
    data = bytearray(video(tmp_path / "x.mp4", [0, 100, 200]).read_bytes())
    a, b, c, d = (part << 16 for part in MATRICES[orientation - 1])
    at = data.index(b"tkhd")
    at += 8 + (32 if data[at + 4] else 20) + 16
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    media = Media("video", bytes(data), "phone.mp4")
    expected = UPRIGHT[orientation](corners())
    size = media_size(media)
    (pixels,) = decode_clip(media, [1], lambda frame: frame)
    assert (size.height, size.width) == pixels.shape[:2] == expected.shape[:2]
    assert (np.abs(pixels.astype(int) - expected) > 90).mean() < 0.1  # edges between blocks are smeared


@pytest.mark.parametrize("form", ["mp4", "mkv", "avi", "ts"])
def test_moments_of_a_video_are_those_of_its_time_stamps(form: str, tmp_path: Path) -> None:
    stamps = [n * 100 for n in range(10)] + [1000 + n * 1000 for n in range(5)]
    if form == "avi":
        stamps = [n * 100 for n in range(15)]
    media = Media("video", video(tmp_path / f"x.{form}", stamps), form)
    size = media_size(media)
    assert size.frames == len(stamps)
    np.testing.assert_allclose(moments(size, np.arange(15)), np.array(stamps) / 1000, atol=0.002)
    assert size.seconds == pytest.approx(stamps[-1] / 1000 + (stamps[-1] - stamps[-2]) / 1000, rel=0.25)
    assert len(decode_clip(media, [0, 14], lambda frame: frame)) == 2


def test_texts_between_frames_say_when_they_are(tmp_path: Path) -> None:
    stamps = [0, 100, 200, 300, 5000, 9000]
    size = media_size(Media("video", video(tmp_path / "x.mkv", stamps), "x"))
    unit = NativeClipUnit("vision", 9, PatchProcessor(16, 2, 2, 4096, 8192), apart=True,
                          written=MediaMarkup("<video>"))  # fmt: skip
    frames = unit.frames(size).tolist()
    texts = [before for before, _, _ in unit.pieces(size)]
    pairs = zip(frames[::2], frames[1::2], strict=True)
    assert texts == [f"<{(stamps[a] + stamps[b]) / 2000:.1f} seconds>" for a, b in pairs]


def test_a_video_without_a_duration_is_counted(tmp_path: Path) -> None:
    path = video(tmp_path / "x.webm", [n * 100 for n in range(20)], "libvpx", live="1")
    size = media_size(Media("video", path, "live"))
    assert (size.frames, size.seconds) == (20, pytest.approx(2.0))


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    video(tmp_path / "x.mp4", [0, 100])
    for text in ("ffconcat version 1.0\nfile x.mp4\n", "#EXTM3U\n#EXTINF:1,\nx.mp4\n#EXT-X-ENDLIST\n"):
        (tmp_path / "list.mp4").write_text(text)
        with pytest.raises(MediaError):
            media_size(Media("video", tmp_path / "list.mp4", "list"))


def test_folder_frames_are_resized_to_the_first_frame(tmp_path: Path) -> None:
    for number, size in enumerate([(64, 32), (32, 32)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    frames = decode_clip(Media("video", tmp_path, "folder"), [0, 1], lambda frame: frame)
    assert [frame.shape for frame in frames] == [(32, 64, 3)] * 2
