"""Sounds: what their headers tell, and how they are decoded.

Files may be damaged, or made to do harm: what a header promises is held against limits before anything is allocated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.open_media import REPLACE, as_media_error, open_media
from dilatant.data.sample import Media, MediaSize

if TYPE_CHECKING:
    from soundfile import SoundFile

SAMPLING_RATES = range(1_000, 1_000_001)
"""Samples a second; what lies outside is a damaged header."""
MAX_HOURS = 4
MAX_FRAMES_PER_BYTE = 8192
"""Silence is the densest sound: FLAC holds up to 65,535 equal samples in 14 bytes."""
BLOCK_SAMPLES = 1 << 20
"""Samples of all channels that are decoded in one go."""


def sound_size(media: Media) -> MediaSize:
    """Seconds, from the header alone. Raises MediaError naming the file."""
    with _opened_sound(media) as sound:
        return MediaSize(seconds=sound.frames / sound.samplerate)


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
            REPLACE,
        )
    wave = resample(wave, rate, sampling_rate)
    if not np.isfinite(wave).all():
        raise MediaError(f"audio {media.name!r} holds values that are no numbers (NaN or infinity)", REPLACE)
    return wave


def resample(wave: NDArray[np.float32], rate: int, to_rate: int) -> NDArray[np.float32]:
    """A wave at another sampling rate, band-limited: float32 [about samples * to_rate / rate]."""
    if rate == to_rate:
        return wave
    import soxr

    return soxr.resample(wave, rate, to_rate)


def _refuse_cut(media: Media, stream: BinaryIO) -> int:
    """Bytes of the file. A WAV or AIFF that ends early is read as a shorter sound; its header tells. A size of all ones
    means unknown."""
    head = stream.read(8)
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    big = head[:4] == b"FORM"
    promised = int.from_bytes(head[4:8], "big" if big else "little") + 8
    if (big or head[:4] == b"RIFF") and length + 1 < promised < 0xFFFFFFF0:
        raise MediaError(f"audio {media.name!r} is cut off: {length} of {promised} bytes", REPLACE)
    return length


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
                raise MediaError(f"audio {media.name!r} {problem}", REPLACE)
            yield sound
