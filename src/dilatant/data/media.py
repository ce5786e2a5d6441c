"""Images and sounds: what their headers tell, and how they are decoded."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.sample import FileSlice, Media, MediaSize

if TYPE_CHECKING:
    from PIL.Image import Image

RESAMPLE_ZERO_CROSSINGS = 24
"""Half-width of the resampling filter; with the window below, aliases are 60 dB down."""
RESAMPLE_ROLLOFF = 0.92
"""Cut-off as a share of the lower Nyquist frequency, which leaves room for the filter's transition band."""

_REPLACE = "replace the file or remove the sample"


def media_size(media: Media) -> MediaSize:
    """Pixels or seconds, from the header alone. Raises MediaError naming the file."""
    if media.kind == "image":
        with _opened_image(media) as image:
            width, height = (image.height, image.width) if _orientation(image) >= 5 else image.size
            return MediaSize(width=width, height=height)
    import soundfile

    with open_media(media) as stream:
        _refuse_cut_riff(media, stream)
        try:
            info = soundfile.info(stream)
        except RuntimeError as error:
            reason = getattr(error, "error_string", error)  # its text would name our stream object
            raise MediaError(f"audio {media.name!r} cannot be read: {reason}", _REPLACE) from None
    if info.frames <= 0:
        raise MediaError(f"audio {media.name!r} is empty", _REPLACE)
    return MediaSize(seconds=info.frames / info.samplerate)


def decode_image(media: Media, channels: int) -> NDArray[np.uint8]:
    """Pixels: uint8 [height, width, channels], with 1 (grey) or 3 (RGB) channels.

    Turned upright where a camera says so; the first frame of an animation; the high byte of 16-bit greys. Raises
    MediaError naming the file.
    """
    from PIL import Image, ImageOps

    with _opened_image(media) as image:
        try:
            upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
            if upright.mode.startswith("I"):
                upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
            converted = upright.convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise MediaError(f"image {media.name!r} is damaged: {error}", _REPLACE) from None
    pixels = np.asarray(converted)
    return pixels[:, :, None] if channels == 1 else pixels


def decode_audio(media: Media, sampling_rate: int) -> NDArray[np.float32]:
    """One channel (the mean of all) at `sampling_rate`: float32 [samples]. Raises MediaError naming the file."""
    import soundfile

    with open_media(media) as stream:
        _refuse_cut_riff(media, stream)
        try:
            with soundfile.SoundFile(stream) as sound:
                promised, rate = sound.frames, sound.samplerate
                wave = sound.read(dtype="float32", always_2d=True).mean(axis=1)
        except RuntimeError as error:
            reason = getattr(error, "error_string", error)  # its text would name our stream object
            raise MediaError(f"audio {media.name!r} cannot be read: {reason}", _REPLACE) from None
    if len(wave) < promised:
        raise MediaError(
            f"audio {media.name!r} is cut off after {len(wave) / rate:.2f} of {promised / rate:.2f} s",
            _REPLACE,
        )
    return resample(wave, rate, sampling_rate)


def _refuse_cut_riff(media: Media, stream: BinaryIO) -> None:
    """A WAV that ends early is read as a shorter sound; its header tells. A size of all ones means unknown."""
    head = stream.read(8)
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    promised = int.from_bytes(head[4:8], "little") + 8
    if head[:4] == b"RIFF" and length + 1 < promised < 0xFFFFFFF0:
        raise MediaError(f"audio {media.name!r} is cut off: {length} of {promised} bytes", _REPLACE)


def resample(wave: NDArray[np.float32], rate: int, to_rate: int) -> NDArray[np.float32]:
    """A wave at another sampling rate: float32 [ceil(samples * to_rate / rate)].

    Band-limited interpolation by a Hann-windowed sinc (J. O. Smith, "Digital Audio Resampling"), one filter for
    each of the phases in which output and input samples can meet.
    """
    if rate == to_rate:
        return wave
    common = math.gcd(rate, to_rate)
    up, down = to_rate // common, rate // common
    filters, half = _resampling_filters(up, down)
    length = -(-len(wave) * up // down)
    padded = np.pad(wave, (half, half + down))
    windows = np.lib.stride_tricks.sliding_window_view(padded, filters.shape[1])
    result = np.empty(length, np.float32)
    for phase in range(min(up, length)):
        first = phase * down // up
        count = len(range(phase, length, up))
        result[phase::up] = windows[first : first + (count - 1) * down + 1 : down] @ filters[phase]
    return result


@lru_cache(maxsize=16)
def _resampling_filters(up: int, down: int) -> tuple[NDArray[np.float32], int]:
    """Filters [up, taps] and the samples before the centre; output n of phase n % up."""
    cutoff = RESAMPLE_ROLLOFF * min(1.0, up / down)
    half = math.ceil(RESAMPLE_ZERO_CROSSINGS / cutoff)
    offset = (np.arange(up) * down % up) / up
    distance = np.arange(-half, half + 1)[None, :] - offset[:, None]
    window = np.where(np.abs(distance) <= half, 0.5 + 0.5 * np.cos(np.pi * distance / half), 0.0)
    filters = cutoff * np.sinc(cutoff * distance) * window
    return (filters / filters.sum(axis=1, keepdims=True)).astype(np.float32), half


def _orientation(image: Image) -> int:
    """The EXIF orientation, 1 (upright) to 8, from the header. In a PNG the tag may follow the pixels: not read."""
    return image.getexif().get(0x0112, 1) if image.format in ("JPEG", "MPO", "TIFF", "WEBP") else 1


@contextmanager
def _opened_image(media: Media) -> Iterator[Image]:
    from PIL import Image

    with open_media(media) as stream:
        try:
            image = Image.open(stream)
        except Image.UnidentifiedImageError:
            raise MediaError(f"image {media.name!r} is no image in a known format", _REPLACE) from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise MediaError(f"image {media.name!r} cannot be read: {error}", _REPLACE) from None
        with image:
            yield image


@contextmanager
def open_media(media: Media) -> Iterator[BinaryIO]:
    """The encoded bytes as a stream. Raises MediaError for a missing file."""
    source = media.source
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    path = source.path if isinstance(source, FileSlice) else source
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed below, where the error above cannot come from the body
    except FileNotFoundError:
        raise MediaError(
            f"{media.kind} {str(path)!r} does not exist",
            "put it there, or correct the path (relative to the data file)",
        ) from None
    except OSError as error:
        raise MediaError(f"{media.kind} {str(path)!r} cannot be opened: {error.strerror}", _REPLACE) from None
    with stream:
        if isinstance(source, FileSlice):
            yield io.BufferedReader(_Slice(stream, source.offset, source.length))
        else:
            yield stream


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
