"""Clips: what their headers tell, and some of their frames decoded.

Video files need PyAV (`pip install 'dilatant[video]'`). Animations (GIF, APNG, WebP) are read by Pillow, and so is a
folder of pictures, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dilatant.data.errors import MediaError
from dilatant.data.image_file import IMAGE_SUFFIXES, MAX_ASPECT, decode_image, image_size
from dilatant.data.open_media import REPLACE, as_media_error, open_media
from dilatant.data.sample import Media, MediaSize

MAX_HOURS = 4
MAX_FRAMES = 1_000_000
MAX_PIXELS = 8192 * 8192
"""Of a frame."""
ANIMATIONS = ("GIF", "PNG", "WEBP")
"""Formats of Pillow that may move."""
LACKING = 0.05
"""The share of promised frames that a file may lack: headers round, and the last frame stands for those."""

Frame = NDArray[np.uint8]
T = TypeVar("T")


def clip_size(media: Media) -> MediaSize:
    """Pixels, frames and seconds, from the header alone. Of a folder of pictures, which are sampled already, no
    seconds. Raises MediaError naming the file."""
    if pictures := _pictures(media):
        size = image_size(pictures[0])
        return MediaSize(size.width, size.height, frames=len(pictures))
    with open_media(media) as stream, as_media_error(media, "cannot be read"):
        with _animation(stream) as image:
            if image is not None:
                count = image.n_frames
                seconds = count * (image.info.get("duration") or 100) / 1000
                return _checked(media, MediaSize(image.width, image.height, seconds, count))
        with _container(stream, media) as video:
            rate = video.average_rate or video.guessed_rate
            if not rate:
                raise MediaError(f"video {media.name!r} does not say how many frames a second has", REPLACE)
            frames = video.frames or round(_seconds(video) * rate)
            return _checked(media, MediaSize(video.width, video.height, float(frames / rate), frames))


def decode_clip(media: Media, frames: Sequence[int], fit: Callable[[Frame], T]) -> list[T]:
    """`fit` of some frames, uint8 [height, width, 3], in their order; each is fitted before the next is decoded, so
    that no more is held. Raises MediaError naming the file."""
    if pictures := _pictures(media):
        return [fit(decode_image(pictures[frame], 3)) for frame in frames]
    wanted = sorted(set(frames))
    made: dict[int, T] = {}
    with open_media(media) as stream, as_media_error(media, "is damaged"):
        with _animation(stream) as image:
            if image is not None:
                for frame in wanted:
                    image.seek(frame)
                    made[frame] = fit(np.asarray(image.convert("RGB")))
                return [made[frame] for frame in frames]
        with _container(stream, media) as video:
            video.thread_type = "AUTO"
            last = None
            count = 0
            for count, frame in enumerate(video.container.decode(video), 1):
                last = frame
                if count - 1 in wanted:
                    made[count - 1] = fit(frame.to_ndarray(format="rgb24"))
                if count > wanted[-1]:
                    break
            missing = [frame for frame in wanted if frame not in made]
            if last is None or (missing and count < (wanted[-1] + 1) * (1 - LACKING)):
                raise MediaError(
                    f"video {media.name!r} is cut off after {count:,} of {wanted[-1] + 1:,} frames", REPLACE
                )
            if missing:
                made |= dict.fromkeys(missing, fit(last.to_ndarray(format="rgb24")))
    return [made[frame] for frame in frames]


def _pictures(media: Media) -> list[Media]:
    if not isinstance(media.source, Path) or not media.source.is_dir():
        return []
    files = sorted(f for f in media.source.iterdir() if f.suffix[1:].lower() in IMAGE_SUFFIXES)
    if not files:
        raise MediaError(f"video {media.name!r} is a folder without pictures", REPLACE)
    return [Media("image", file, f"{media.name}/{file.name}") for file in files]


@contextmanager
def _animation(stream: Any) -> Iterator[Any]:
    """The animation that Pillow reads; None where it is no picture. The stream is at its beginning again then."""
    from PIL import Image

    try:
        image = Image.open(stream, formats=ANIMATIONS)
    except Image.UnidentifiedImageError:
        stream.seek(0)
        yield None
        return
    with image:
        yield image


@contextmanager
def _container(stream: Any, media: Media) -> Iterator[Any]:
    try:
        import av
    except ImportError:
        raise MediaError(
            f"video {media.name!r} needs PyAV", "install it: pip install 'dilatant[video]'"
        ) from None
    with av.open(stream, metadata_errors="ignore") as container:
        if not container.streams.video:
            raise MediaError(f"video {media.name!r} holds no pictures", REPLACE)
        video = container.streams.video[0]
        yield video


def _seconds(video: Any) -> Any:
    if video.duration:
        return video.duration * video.time_base
    return (video.container.duration or 0) / 1_000_000


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
