"""Native-resolution clips (Qwen-VL): a few frames per second, patches of several frames each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError
from dilatant.data.media.clip import Frame, decode_clip
from dilatant.data.media.pixels import EncoderInput, Pixels
from dilatant.data.media_units.frame_choice import moments
from dilatant.data.media_units.native_image_unit import GRID, STEP, PatchProcessor
from dilatant.data.media_units.unit_base import PiecedClipUnit
from dilatant.data.sample import Media, MediaMarkup, MediaSize


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Even frame sampling: `fps` frames per second, at least `min_frames` and at most `max_frames`. Frames that were
    sampled already are all kept, up to `max_frames`."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def __post_init__(self) -> None:
        if not (self.fps > 0 and math.isfinite(self.fps)) or not 1 <= self.min_frames <= self.max_frames:
            raise UserError(
                f"processor: fps {self.fps:g} must be positive, and min_frames {self.min_frames} at least 1 and no "
                f"more than max_frames {self.max_frames}"
            )

    def frames(self, size: MediaSize, multiple: int = 1, to_end: bool = False) -> NDArray[np.int64]:
        """Return the frame indices, in a number divisible by `multiple` if the clip has enough frames. to_end: spread
        from the first to the last frame, in any number."""
        total = size.frames
        if not size.seconds and total <= self.max_frames:
            return np.arange(total)
        count: float = min(total, self.max_frames)
        if size.seconds:
            count = min(max(size.seconds * self.fps, self.min_frames), count)
        if to_end:
            return np.linspace(0, total - 1, max(1, int(count))).round().astype(np.int64)
        even = math.floor(count / multiple) * multiple or min(total, multiple)
        return (np.arange(even) * (total / even)).astype(np.int64)

    def seconds(self, size: MediaSize) -> float:
        """Return the seconds from one frame of a clip to the next."""
        return size.seconds / size.frames if size.seconds else 1 / self.fps


@dataclass(frozen=True, slots=True)
class NativeClipUnit(PiecedClipUnit):
    """Media unit for clips: one item, with one temporal patch for every `processor.frames` frames.

    processor: holds the pixel limits of a frame. total_pixels: limit over all temporal patches, shared evenly by the
    frames. time_scale: text positions per second; None for one per temporal patch. apart: each temporal patch is an
    item, preceded by its time as text, and the pixel limits are those of all frames together.
    """

    name: str
    placeholder_id: int
    processor: PatchProcessor
    sampling: FrameSampling = FrameSampling()
    total_pixels: int | None = None
    time_scale: float | None = None
    apart: bool = False
    marker: str = "<video>"
    written: MediaMarkup | None = None

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        """Return the indices of the sampled frames."""
        return self.sampling.frames(size, self.processor.frames, to_end=self.apart)

    def _grid(self, size: MediaSize) -> tuple[int, int, int]:
        """Return the numbers of patches: (time, rows, columns)."""
        count = len(self.frames(size))
        return -(-count // self.processor.frames), *self._limited(count).grid(size)

    def _limited(self, count: int) -> PatchProcessor:
        """Return the processor with the pixel limits of one of `count` frames."""
        own = self.processor
        if self.apart:
            return replace(own, min_pixels=own.min_pixels / count, max_pixels=own.max_pixels / count)
        if self.total_pixels is None:
            return own
        share = self.total_pixels * own.frames // count
        return replace(own, max_pixels=max(min(own.max_pixels, share), int(own.min_pixels * 1.05)))

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the grid and time step of a clip, for later stages of the encoder and for text positions."""
        time, rows, columns = self._grid(size)
        if self.apart:
            return {GRID: np.array([[1, rows, columns]] * time, np.int64), STEP: np.ones(time)}
        step = 1.0
        if self.time_scale is not None:
            # Mean seconds from one sampled frame to the next.
            between = self.sampling.seconds(size) * size.frames / len(self.frames(size))
            step = float(np.float32(self.time_scale) * np.float32(self.processor.frames * between))
        return {GRID: np.array([[time, rows, columns]], np.int64), STEP: np.array([step])}

    def encoder_tokens(self, size: MediaSize) -> int:
        return math.prod(self._grid(size))

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {**self.processor.limits, **asdict(self.sampling)}

    def merged_tokens(self, size: MediaSize) -> int:
        return self.encoder_tokens(size) // self.processor.merge**2

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each group of the clip's tokens, the text before them, their number, and the text after them."""
        before, after = ("", "") if self.written is None else (self.written.opens, self.written.closes)
        if not self.apart:
            return [(before, self.merged_tokens(size), after)]
        time = self._grid(size)[0]
        frames, each = self.frames(size), self.processor.frames
        numbers = np.append(frames, np.repeat(frames[-1:], time * each - len(frames))).reshape(time, each)
        # The time of a temporal patch is the middle of its first and last frame.
        ends = numbers[:, [0, -1]]
        shown = moments(size, ends) if size.stamps else ends * self.sampling.seconds(size)
        tokens = self.merged_tokens(size) // time
        return [(f"<{moment:.1f} seconds>{before}", tokens, after) for moment in shown.mean(axis=1)]

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        """Return `pixel_values`: [patches, channels, frames * patch, patch], laid out as for an image; the last frame
        is repeated to fill the last temporal patch."""
        from PIL import Image

        time, rows, columns = self._grid(size)
        processor = self.processor
        shape = (columns * processor.patch, rows * processor.patch)

        def fit(frame: Frame) -> Frame:
            return np.asarray(Image.fromarray(frame).resize(shape, Image.Resampling[processor.resample.upper()]))

        frames = decode_clip(media, self.frames(size).tolist(), fit)
        frames += frames[-1:] * (time * processor.frames - len(frames))
        merge, patch = processor.merge, processor.patch
        values = np.stack(frames).reshape(
            time, processor.frames, rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        values = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        values = values.reshape(time * rows * columns, 3, processor.frames * patch, patch)
        pixels = Pixels(values, processor.rescale, processor.mean, processor.std)
        return {"pixel_values": pixels, **self.grid(size)}


CLIP_SETTINGS = (
    *("fps", "min_frames", "max_frames", "video_fps", "video_maxlen"),
    *("video_min_pixels", "video_max_pixels", "video_total_pixels"),
)
"""Names in use for the limits of clips."""


def frame_sampling(settings: Mapping[str, Any]) -> FrameSampling:
    """Read the frame sampling from settings. Raises UserError."""
    names = {"video_fps": "fps", "video_maxlen": "max_frames"}
    kinds = {"fps": float, "min_frames": int, "max_frames": int}
    given: dict[str, Any] = {}
    for key, value in settings.items():
        name = names.get(key, key)
        if value is None or (name not in kinds and key not in CLIP_SETTINGS):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"processor: {key} is {value!r}; it must be a number above 0")
        if name in kinds:
            given[name] = kinds[name](value)
    if "max_frames" in given and "min_frames" not in given:
        given["min_frames"] = min(FrameSampling().min_frames, given["max_frames"])
    return FrameSampling(**given)
