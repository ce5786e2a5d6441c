"""Clips: read sizes from headers and decode selected frames.

Video files need PyAV (`pip install 'dilatant[video]'`). Pillow reads animations (GIF, APNG, WebP, AVIF) and folders of
pictures, which are frames in the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.media.image_file import (
    IMAGE_SUFFIXES,
    MAX_ASPECT,
    check_pixels,
    decode_image,
    image_size,
    open_picture,
    png_chunks,
    read_at,
    upright_pixels,
    upright_size,
)
from dilatant.data.media.open_media import REPLACE, as_media_error, open_av, open_media
from dilatant.data.sample import Frames, Media, MediaSize

ANIMATIONS = ("GIF", "PNG", "WEBP", "AVIF")
"""Formats of Pillow that may be animated."""
MAX_FRAMES = 1_000_000
"""Frames of a clip; a header that claims more is refused."""
UNSAID = 100
"""Milliseconds that viewers show a frame whose file gives no duration or zero."""


def first_frame(image: Any) -> int:
    """Return the index of the first frame: an APNG may begin with a still picture for viewers without animation."""
    return int(bool(image.info.get("default_image")))


def milliseconds(image: Any, stream: BinaryIO) -> list[float]:
    """Return the duration in milliseconds of each frame of an opened animation; at most `MAX_FRAMES` + 1 values. The
    stream position is restored."""
    count, place = min(getattr(image, "n_frames", 1) - first_frame(image), MAX_FRAMES + 1), stream.tell()
    read = {"GIF": _gif, "PNG": _png, "WEBP": _webp}.get(image.format)
    said = _by_decoding(image, count) if read is None else read(stream)
    waits = [wait or UNSAID for _, wait in zip(range(count), said)]
    stream.seek(place)
    return waits + [UNSAID] * (count - len(waits))


def _gif(stream: BinaryIO) -> Iterator[float]:
    def colours(flags: int) -> int:
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    at, wait = 13 + colours(read_at(stream, 10, 1)[0]), 0
    while len(head := read_at(stream, at, 10)) == 10 and head[:1] in (b"!", b","):
        at += 2 if head[:1] == b"!" else 11 + colours(head[9])
        if head[:2] == b"!\xf9":
            wait = 10 * int.from_bytes(head[4:6], "little")
        elif head[:1] == b",":
            yield wait
            wait = 0
        while (length := read_at(stream, at, 1)) not in (b"", b"\0"):
            at += 1 + length[0]
        at += 1


def _png(stream: BinaryIO) -> Iterator[float]:
    for name, at, _ in png_chunks(stream):
        if name == b"fcTL":
            numbers = read_at(stream, at + 28, 4)
            yield 1000 * int.from_bytes(numbers[:2], "big") / (int.from_bytes(numbers[2:], "big") or 100)


def _webp(stream: BinaryIO) -> Iterator[float]:
    at = 12
    while len(head := read_at(stream, at, 23)) == 23:
        if head[:4] == b"ANMF":
            yield int.from_bytes(head[20:23], "little")
        length = int.from_bytes(head[4:8], "little")
        at += 8 + length + length % 2


def _by_decoding(image: Any, count: int) -> Iterator[float]:
    for frame in range(count if count > 1 else 0):
        image.seek(frame)
        image.load()
        yield image.info.get("duration")


MAX_HOURS = 4
MAX_PIXELS = 8192 * 8192
"""Pixels of a frame."""
LACKING = 0.05
"""Fraction of the frames in its header that a file may lack, as headers round; the last frame is repeated instead."""

Frame = NDArray[np.uint8]
T = TypeVar("T")


def clip_size(media: Media) -> MediaSize:
    """Return pixels, frames and seconds from the header. If the header does not suffice, they come from the time stamps
    of all packets; only the first frame is decoded. Pictures without a frame rate have no seconds, as they are sampled
    already. Raises MediaError naming the file."""
    if pictures := _pictures(media):
        size = image_size(pictures[0])
        fps = media.source.fps if isinstance(media.source, Frames) else None
        seconds = len(pictures) / fps if fps else 0.0
        return MediaSize(size.width, size.height, seconds, len(pictures))
    with open_media(media) as stream, as_media_error(media, "cannot be read"):
        with _animation(stream) as found:
            if found is not None:
                image, orientation = found
                waits = np.array(milliseconds(image, stream))
                uneven = (waits != waits[:1]).any()
                times = tuple(((np.cumsum(waits) - waits) / 1000).tolist()) if uneven else ()
                shape = upright_size(image, orientation)
                return _checked(media, MediaSize(*shape, float(waits.sum()) / 1000, len(waits), stamps=times))
        with open_av(stream, media, "video") as video:
            return _checked(media, _video_size(video, media))


def decode_clip(media: Media, frames: Sequence[int], fit: Callable[[Frame], T]) -> list[T]:
    """Return `fit` of selected frames, in order. `fit` gets uint8 [height, width, 3], upright and on white; each frame
    is fitted before the next is decoded, so that only one full frame is held. Raises MediaError naming the file."""
    if pictures := _pictures(media):
        size = image_size(pictures[0])
        return [fit(_as_large(decode_image(pictures[frame], 3), size)) for frame in frames]
    wanted = sorted(set(frames))
    made: dict[int, T] = {}
    with open_media(media) as stream, as_media_error(media, "is damaged"):
        with _animation(stream) as found:
            if found is not None:
                image, orientation = found
                promised, offset = upright_size(image, orientation), first_frame(image)
                for frame in wanted:
                    image.seek(offset + frame)
                    pixels = upright_pixels(image, orientation, "RGB")
                    check_pixels(media, pixels, promised)
                    made[frame] = fit(pixels)
                return [made[frame] for frame in frames]
        with open_av(stream, media, "video") as video:
            video.thread_type = "AUTO"
            first: Any = None
            last: Any = None
            count = 0
            for count, last in enumerate(video.container.decode(video), 1):
                first = first or last
                if count - 1 in wanted:
                    made[count - 1] = fit(_pixels(last, first))
                if count > wanted[-1]:
                    break
            missing = [frame for frame in wanted if frame not in made]
            if first is None or (missing and count < (wanted[-1] + 1) * (1 - LACKING)):
                raise MediaError(
                    f"video {media.name!r} is cut off after {count:,} of {wanted[-1] + 1:,} frames", REPLACE
                )
            if missing:
                made |= dict.fromkeys(missing, fit(_pixels(last, first)))
    return [made[frame] for frame in frames]


def _as_large(pixels: Frame, size: MediaSize) -> Frame:
    """Resize a picture of a folder to the size of the first picture."""
    from PIL import Image

    if pixels.shape[:2] == (size.height, size.width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size.width, size.height)))


def _pictures(media: Media) -> list[Media]:
    if isinstance(media.source, Frames):
        return list(media.source.pictures)
    if not isinstance(media.source, Path) or not media.source.is_dir():
        return []
    files = sorted(f for f in media.source.iterdir() if f.suffix[1:].lower() in IMAGE_SUFFIXES)
    if not files:
        raise MediaError(f"video {media.name!r} is a folder without pictures", REPLACE)
    return [Media("image", file, f"{media.name}/{file.name}") for file in files]


@contextmanager
def _animation(stream: BinaryIO) -> Iterator[tuple[Any, int] | None]:
    """Yield the animation that Pillow reads and its orientation; None, with the stream rewound to its start, if it is
    no picture."""
    from PIL import UnidentifiedImageError

    try:
        image, orientation = open_picture(stream, ANIMATIONS)
    except UnidentifiedImageError:
        stream.seek(0)
        yield None
        return
    with image:
        yield image, orientation


def _pixels(frame: Any, first: Any) -> Frame:
    """Return a frame of a video, uint8 [height, width, 3], upright and on white, in the size of the first frame."""
    from PIL import Image

    clear = any(component.is_alpha for component in frame.format.components)
    form = "rgba" if clear else "rgb24"
    stored = frame.to_ndarray(format=form, width=first.width, height=first.height)
    turn = _orientation(first)
    return stored if turn == 1 and not clear else upright_pixels(Image.fromarray(stored), turn, "RGB")


_ORIENTATIONS: list[tuple[int, ...]] = [
    *((1, 0, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, -1), (1, 0, 0, -1)),
    *((0, 1, 1, 0), (0, 1, -1, 0), (0, -1, -1, 0), (0, -1, 1, 0)),
]
"""Signs of display matrices in the order of EXIF's orientations: (x, y) is shown at (ax + cy, bx + dy)."""


def _orientation(frame: Any) -> int:
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 1
    parts = np.frombuffer(matrix, np.int32)[[0, 1, 3, 4]] / 65536
    signs = tuple(parts.round().astype(int).tolist())
    return _ORIENTATIONS.index(signs) + 1 if signs in _ORIENTATIONS else 1


def _video_size(video: Any, media: Media) -> MediaSize:
    """Return the size by the first frame and, if an index lists all frames and they are evenly spaced, by the header.
    Otherwise all packets are read, undecoded: headers of live recordings lack the length, those of screen recordings
    the frame rate."""
    entries = getattr(video, "index_entries", ()) if 0 < video.frames <= MAX_FRAMES else ()
    indexed = [entry.timestamp for entry in entries if not entry.is_discard]
    rate = video.average_rate or video.guessed_rate
    told = len(indexed) if rate and len(entries) == video.frames and not _uneven(indexed) else 0
    shape: tuple[int, int] | None = None
    stamps: list[Any] = []
    last = 0
    for packet in video.container.demux(video):
        if shape is None:
            shape = next((upright_size(frame, _orientation(frame)) for frame in packet.decode()), None)
        if shape is not None and told:
            return MediaSize(*shape, float(told / rate), told)
        if packet.size and not packet.is_discard:
            stamps.append(packet.dts if packet.pts is None else packet.pts)
            last = packet.duration or 0
    if shape is None:
        raise MediaError(f"video {media.name!r} holds no pictures", REPLACE)
    count = len(stamps)
    if None in stamps or len(set(stamps)) < 2:
        if not rate:
            raise MediaError(f"video {media.name!r} does not say how many frames a second has", REPLACE)
        return MediaSize(*shape, float(count / rate), count)
    stamps.sort()
    tick, span = video.time_base, stamps[-1] - stamps[0]
    if not _uneven(stamps):
        return MediaSize(*shape, float(tick * span * count / (count - 1)), count)
    times = tuple(float(tick * (stamp - stamps[0])) for stamp in stamps)
    return MediaSize(*shape, float(tick * span) + float(tick * last), count, stamps=times)


def _uneven(stamps: Sequence[int]) -> bool:
    """Return True if a frame is shown more than half a frame before or after its time at an even rate."""
    if len(stamps) < 3:
        return False
    even = np.linspace(stamps[0], stamps[-1], len(stamps))
    return bool(np.abs(np.asarray(stamps) - even).max() > (even[1] - even[0]) / 2)


def _checked(media: Media, size: MediaSize) -> MediaSize:
    short, long = sorted((size.width, size.height))
    problem = None
    if size.frames < 1 or short < 1:
        problem = "is empty"
    elif size.frames > MAX_FRAMES or size.seconds > MAX_HOURS * 3600:
        problem = f"promises {size.frames:,} frames in {size.seconds:,.0f} s"
    elif short * long > MAX_PIXELS or long > MAX_ASPECT * short:
        problem = f"has frames of {size.width} x {size.height} pixels"
    if problem:
        raise MediaError(f"video {media.name!r} {problem}", "cut it into pieces or remove the sample")
    return size
