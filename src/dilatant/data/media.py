"""Images and sounds: what their headers tell, and how they are decoded.

Files may be damaged, or made to do harm: what a header promises is held against limits before anything is allocated.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError, may_pass
from dilatant.data.sample import FileSlice, Media, MediaSize

if TYPE_CHECKING:
    from PIL.Image import Image
    from soundfile import SoundFile

MAX_ASPECT = 200
"""Longest side of an image for its shortest: resizing to a shortest edge would make more of it than memory holds.
Native-resolution encoders (Qwen2-VL) have the same limit."""
SAMPLING_RATES = range(1_000, 1_000_001)
"""Samples a second; what lies outside is a damaged header."""
MAX_HOURS = 4
MAX_FRAMES_PER_BYTE = 8192
"""Silence is the densest sound: FLAC holds up to 65,535 equal samples in 14 bytes."""
BLOCK_SAMPLES = 1 << 20
"""Samples of all channels that are decoded in one go."""

_REPLACE = "replace the file or remove the sample"


def media_size(media: Media) -> MediaSize:
    """Pixels, seconds or both, from the header alone. Raises MediaError naming the file.

    What `decode_image` and `decode_audio` would refuse for its header's sake is refused here.
    """
    if media.kind == "video":
        from dilatant.data.clip import clip_size  # which needs what is here

        return clip_size(media)
    if media.kind == "image":
        with _opened_image(media) as image:
            width, height = (image.height, image.width) if _orientation(image) >= 5 else image.size
            return MediaSize(width=width, height=height)
    with _opened_sound(media) as sound:
        return MediaSize(seconds=sound.frames / sound.samplerate)


def decode_image(media: Media, channels: int) -> NDArray[np.uint8]:
    """Pixels: uint8 [height, width, channels], with 1 (grey) or 3 (RGB) channels.

    Turned upright where a camera says so; on white where it is transparent; the first frame of an animation; the high
    byte of 16-bit greys. Raises MediaError naming the file.
    """
    from PIL import Image, ImageOps

    with _opened_image(media) as image, as_media_error(media, "is damaged"):
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        if upright.mode.startswith("I"):
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
        elif upright.has_transparency_data:
            layer = upright.convert("RGBA")
            upright = Image.new("RGBA", layer.size, "white")
            upright.alpha_composite(layer)
        pixels = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
    return pixels[:, :, None] if channels == 1 else pixels


def decode_audio(media: Media, sampling_rate: int) -> NDArray[np.float32]:
    """One channel (the mean of all) at `sampling_rate`: float32 [samples]. Raises MediaError naming the file."""
    with _opened_sound(media) as sound, as_media_error(media, "cannot be read"):
        promised, rate = sound.frames, sound.samplerate
        frames = max(1, BLOCK_SAMPLES // sound.channels)
        blocks = [np.zeros(0, np.float32)]
        with np.errstate(all="ignore"):  # what is no number is found below
            # Not by its `blocks`, which go on with what was read before where the sound is cut off.
            while len(block := sound.read(frames, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1))
    wave = np.concatenate(blocks)
    if len(wave) < promised:
        raise MediaError(
            f"audio {media.name!r} is cut off after {len(wave) / rate:.2f} of {promised / rate:.2f} s",
            _REPLACE,
        )
    wave = resample(wave, rate, sampling_rate)
    if not np.isfinite(wave).all():
        raise MediaError(f"audio {media.name!r} holds values that are no numbers (NaN or infinity)", _REPLACE)
    return wave


def _refuse_cut(media: Media, stream: BinaryIO) -> int:
    """Bytes of the file. A WAV or AIFF that ends early is read as a shorter sound; its header tells. A size of all ones
    means unknown."""
    head = stream.read(8)
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    big = head[:4] == b"FORM"
    promised = int.from_bytes(head[4:8], "big" if big else "little") + 8
    if (big or head[:4] == b"RIFF") and length + 1 < promised < 0xFFFFFFF0:
        raise MediaError(f"audio {media.name!r} is cut off: {length} of {promised} bytes", _REPLACE)
    return length


def resample(wave: NDArray[np.float32], rate: int, to_rate: int) -> NDArray[np.float32]:
    """A wave at another sampling rate, band-limited: float32 [about samples * to_rate / rate]."""
    if rate == to_rate:
        return wave
    import soxr

    return soxr.resample(wave, rate, to_rate)


def _orientation(image: Image) -> int:
    """The EXIF orientation, 1 (upright) to 8, from the header. In a PNG the tag may follow the pixels: not read."""
    return image.getexif().get(0x0112, 1) if image.format in ("JPEG", "MPO", "TIFF", "WEBP") else 1


@contextmanager
def as_media_error(media: Media, problem: str) -> Iterator[None]:
    """Inside, every error is a MediaError: decoders raise all kinds on bytes that are not what they expect."""
    try:
        yield
    except MediaError:
        raise
    except Exception as error:
        reason = getattr(error, "error_string", error)  # soundfile's text would name our stream object
        raise MediaError(
            f"{media.kind} {media.name!r} {problem}: {reason}", _REPLACE, may_pass(error)
        ) from None


@contextmanager
def _opened_image(media: Media) -> Iterator[Image]:
    from PIL import Image

    with open_media(media) as stream:
        with as_media_error(media, "cannot be read"):
            try:
                image = Image.open(stream)
            except Image.UnidentifiedImageError:
                raise MediaError(f"image {media.name!r} is no image in a known format", _REPLACE) from None
            short, long = sorted(image.size)
            if long > MAX_ASPECT * short:
                raise MediaError(
                    f"image {media.name!r} has {image.width} x {image.height} pixels, a side more than {MAX_ASPECT} "
                    "times the other",
                    "cut it into pieces or remove the sample",
                )
            if image.mode == "F":
                raise MediaError(
                    f"image {media.name!r} holds fractions, of which nobody knows what is black and what white",
                    "save it with 8 or 16 bits a channel",
                )
        with image:
            yield image


@contextmanager
def _opened_sound(media: Media) -> Iterator[SoundFile]:
    """A sound whose header is within the limits."""
    import soundfile

    with open_media(media) as stream:
        with as_media_error(media, "cannot be read"):
            length = _refuse_cut(media, stream)
            sound = soundfile.SoundFile(stream)
        with sound:
            problem = None
            if sound.frames <= 0:
                problem = "is empty"
            elif sound.samplerate not in SAMPLING_RATES:
                low, high = SAMPLING_RATES[0], SAMPLING_RATES[-1]
                problem = f"has {sound.samplerate:,} samples a second, which is not in {low:,} to {high:,}"
            elif sound.frames > MAX_FRAMES_PER_BYTE * length:
                problem = f"promises {sound.frames:,} samples in {length:,} bytes"
            elif sound.frames > MAX_HOURS * 3600 * sound.samplerate:
                problem = f"lasts more than {MAX_HOURS} hours"
            if problem:
                raise MediaError(f"audio {media.name!r} {problem}", _REPLACE)
            yield sound


@contextmanager
def open_media(media: Media) -> Iterator[BinaryIO]:
    """The encoded bytes as a stream. Raises MediaError for a missing file, or one that is no regular file."""
    source = media.source
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    path = source.path if isinstance(source, FileSlice) else source
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise MediaError(
            f"{media.kind} {str(path)!r} does not exist",
            "put it there, or correct the path (relative to the data file)",
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"{media.kind} {str(path)!r} cannot be opened: {reason}"
        raise MediaError(problem, _REPLACE, may_pass(error)) from None
    with stream:
        if isinstance(source, FileSlice):
            yield io.BufferedReader(_Slice(stream, source.offset, source.length))
        else:
            yield stream


def open_regular(path: Path) -> BinaryIO:
    """A file for reading; a pipe or a device, which might never answer, is not opened. Raises OSError, and ValueError
    for a name that no file can have."""
    stream = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.close()
    raise OSError(0, "it is no regular file")


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._position))
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
