"""Sound files: read durations from headers, and decode.

libsndfile reads WAV, FLAC, OGG, MP3 and the like. PyAV, if installed (`pip install 'dilatant[video]'`), reads the rest,
such as M4A and the sound of videos. Files may be damaged or malicious: a header's claims are checked against limits
before anything is allocated.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.image_file import read_at
from dilatant.data.media.open_media import REPLACE, as_media_error, open_av, open_media
from dilatant.data.sample import Media, MediaSize

SAMPLING_RATES = range(1_000, 1_000_001)
"""Valid sampling rates in Hz; a header with another rate is damaged."""
MAX_HOURS = 4
MAX_FRAMES_PER_BYTE = 8192
"""Limit of compression: silence is densest, and FLAC holds up to 65,535 equal samples in 14 bytes."""
BLOCK_SAMPLES = 1 << 20
"""Samples, over all channels, that are decoded at a time."""
ROUNDED_SECONDS = 0.3
"""Tolerance for files read by PyAV: their time stamps count whole packets."""
TRIMMED_SECONDS = 0.1
"""Length of the last packet's end that a header may leave out."""
UNKNOWN = (1 << 63) - 1
"""Length that libsndfile reports for a sound of unknown length."""


@dataclass(frozen=True, slots=True)
class _Sound:
    """An opened sound. frames: samples of each channel, at `rate` Hz. rounded: allowed difference of the decoded
    samples. blocks: decodes the mean of all channels in blocks: float32 [samples]."""

    frames: int
    rate: int
    blocks: Callable[[], Iterator[NDArray[np.float32]]]
    rounded: int = 0


def sound_size(media: Media) -> MediaSize:
    """Return the seconds by the header or, if it only estimates, by time stamps. Raises MediaError naming the file."""
    with _opened_sound(media) as sound:
        return MediaSize(seconds=sound.frames / sound.rate)


def decode_audio(media: Media, sampling_rate: int) -> NDArray[np.float32]:
    """Decode the mean of all channels at `sampling_rate`: float32 [samples]. Raises MediaError naming the file."""
    with _opened_sound(media) as sound, as_media_error(media, "cannot be read"):
        promised, rate = sound.frames, sound.rate
        with np.errstate(all="ignore"):  # NaN and infinity are refused below
            wave = np.concatenate([np.zeros(0, np.float32), *sound.blocks()])
    if abs(len(wave) - promised) > sound.rounded:
        what = "is cut off after" if len(wave) < promised else "goes on after its end, up to"
        raise MediaError(f"audio {media.name!r} {what} {len(wave) / rate:.2f} of {promised / rate:.2f} s", REPLACE)
    wave = resample(np.pad(wave[:promised], (0, max(0, promised - len(wave)))), rate, sampling_rate)
    if not np.isfinite(wave).all():
        raise MediaError(f"audio {media.name!r} holds values that are no numbers (NaN or infinity)", REPLACE)
    return wave


def resample(wave: NDArray[np.float32], rate: int, to_rate: int) -> NDArray[np.float32]:
    """Resample a wave, band-limited, to another sampling rate: float32 [about samples * to_rate / rate]."""
    if rate == to_rate:
        return wave
    import soxr

    return soxr.resample(wave, rate, to_rate)


def _refuse_cut(media: Media, stream: BinaryIO) -> int:
    """Return the bytes of the file. Raises MediaError for a WAV or AIFF shorter than its header says, which libsndfile
    would read as a shorter sound. A size of all ones means unknown."""
    head = stream.read(8)
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    big = head[:4] == b"FORM"
    promised = int.from_bytes(head[4:8], "big" if big else "little") + 8
    if (big or head[:4] == b"RIFF") and length + 1 < promised < 0xFFFFFFF0:
        raise MediaError(f"audio {media.name!r} is cut off: {length} of {promised} bytes", REPLACE)
    return length


@contextmanager
def _opened_sound(media: Media) -> Iterator[_Sound]:
    """Yield a sound whose header is within the limits."""
    with open_media(media) as stream:
        with as_media_error(media, "cannot be read"):
            length = _refuse_cut(media, stream)
            sound = _by_soundfile(stream) or _by_av(media, stream)
            problem = None
            if sound.frames <= 0:
                problem = "is empty"
            elif sound.rate not in SAMPLING_RATES:
                low, high = SAMPLING_RATES[0], SAMPLING_RATES[-1]
                problem = f"has {sound.rate:,} samples a second, which is not in {low:,} to {high:,}"
            elif sound.frames > MAX_FRAMES_PER_BYTE * length:
                problem = f"promises {sound.frames:,} samples in {length:,} bytes"
            elif sound.frames > MAX_HOURS * 3600 * sound.rate:
                problem = f"lasts more than {MAX_HOURS} hours"
            if problem:
                raise MediaError(f"audio {media.name!r} {problem}", REPLACE)
        yield sound


def _by_soundfile(stream: BinaryIO) -> _Sound | None:
    """Open a sound with libsndfile; None if it cannot read all of it: it stops an MP3 at the estimated length."""
    import soundfile

    def blocks() -> Iterator[NDArray[np.float32]]:
        stream.seek(0)
        with soundfile.SoundFile(stream) as sound:
            frames = max(1, BLOCK_SAMPLES // sound.channels)
            # Not `sound.blocks`, which repeats the previous block if the sound is cut off.
            while len(block := sound.read(frames, dtype="float32", always_2d=True)):
                yield block.mean(axis=1)

    is_counted = _mp3_is_counted(stream)
    if is_counted is False:  # not opened, as libmpg123 writes warnings to the terminal
        return None
    stream.seek(0)
    with suppress(soundfile.LibsndfileError), soundfile.SoundFile(stream) as sound:
        if sound.frames != UNKNOWN and (is_counted or sound.format != "MP3"):
            return _Sound(sound.frames, sound.samplerate, blocks)
    return None


def _mp3_is_counted(stream: BinaryIO) -> bool | None:
    """Return True if an MP3 has a Xing header with a frame count, and with a byte count that matches this file. A file
    that was cut from another does not match; its length is estimated from the first frame. None for a file that does
    not begin as an MP3."""
    at = 0
    while (head := read_at(stream, at, 10))[:3] == b"ID3" and len(head) == 10:
        at += 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0)))
    frame = read_at(stream, at, 64)
    if len(frame) < 64 or frame[0] != 0xFF or frame[1] < 0xE0:
        return None
    found = max(frame.find(b"Xing"), frame.find(b"Info"))
    counted, there = int.from_bytes(frame[found + 12 : found + 16], "big"), stream.seek(0, io.SEEK_END) - at
    return found > 0 and frame[found + 7] & 3 == 3 and abs(counted - there) <= 0.01 * there


def _by_av(media: Media, stream: BinaryIO) -> _Sound:
    """Open a sound with PyAV. Its length is by packet time stamps, or by decoding if the header differs from them."""

    def blocks() -> Iterator[NDArray[np.float32]]:
        import av

        stream.seek(0)
        with open_av(stream, media, "audio") as track:
            resampler = av.AudioResampler(format="fltp", rate=rate)
            for packet in track.container.demux(track):
                with suppress(av.InvalidDataError):  # skipped as by ffmpeg; the length check finds large gaps
                    for frame in (*packet.decode(), *([] if packet.size else [None])):
                        yield from (part.to_ndarray().mean(axis=0) for part in resampler.resample(frame))

    stream.seek(0)
    with open_av(stream, media, "audio") as track:
        rate = track.codec_context.sample_rate
        said = (track.duration or 0) * track.time_base or (track.container.duration or 0) / 1_000_000
        start, end = track.start_time, 0
        for packet in track.container.demux(track):
            if packet.size and packet.pts is not None:
                start = packet.pts if start is None else start
                end = max(end, packet.pts + (packet.duration or 0))
        seconds = (end - (start or 0)) * track.time_base
    if said > 0 and abs(said - seconds) > ROUNDED_SECONDS:  # one of the two is an estimate
        return _Sound(sum(map(len, blocks())), rate, blocks)
    if said > 0 and 0 < seconds - said < TRIMMED_SECONDS:
        seconds = said
    return _Sound(round(seconds * rate), rate, blocks, round(max(seconds / 100, ROUNDED_SECONDS) * rate))
