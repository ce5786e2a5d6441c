"""Frame selection: the rules of model families that process a clip's frames as images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.data.media.clip import decode_clip
from dilatant.data.media.pixels import EncoderInput, concatenate_inputs
from dilatant.data.media_units.image_unit import ImageUnit
from dilatant.data.media_units.processed_unit import ProcessedImageUnit
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit
from dilatant.data.media_units.unit_base import PiecedClipUnit
from dilatant.data.sample import Media, MediaMarkup, MediaSize

UNTIMED_FPS = 24.0
"""Frames per second that the families assume for frames that were sampled already and have no rate."""


class FrameChoice(Protocol):
    """Protocol: a selection rule. Its repr identifies the rule in fingerprints."""

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        """Return the indices of the selected frames, ascending; all of them if the frames were sampled already."""

    def limits(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of this rule in `video_preprocessor_config.json`, whose present content is `before`."""


def saved_limits(choice: FrameChoice, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule's settings; none where the family's default needs no settings file."""
    return {} if not before and choice == type(choice)() else choice.limits(before)


def moments(size: MediaSize, frames: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the times of these frames in seconds."""
    if size.stamps:
        return np.array(size.stamps)[frames]
    return frames / (size.frames / size.seconds if size.seconds else UNTIMED_FPS)


@dataclass(frozen=True, slots=True)
class MiddleFrames:
    """Select the middle frame of equal parts of the clip (InternVL). count: number of parts; None for `fps` parts per
    second. Shorter clips keep all frames."""

    count: int | None = None
    fps: float = 1.0

    def limits(self, before: Mapping[str, Any]) -> dict[str, Any]:
        # Only one of the two: transformers refuses both.
        return {"num_frames": self.count, "fps": self.fps if self.count is None else None}

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        wanted = self.count
        if wanted is None and size.seconds:
            wanted = max(1, int(size.seconds * self.fps))
        if wanted is None or not size.seconds or wanted >= size.frames:
            return np.arange(size.frames)
        step = size.frames / wanted
        # In float32, as the family computes it.
        return np.arange(step / 2, size.frames, step).astype(np.float32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """Select the first frame of equal parts of the clip (transformers' default: Gemma 4, LLaVA-OneVision). fps: parts
    per second; None for `count` parts. Shorter clips keep all frames."""

    count: int = 32
    fps: float | None = None

    def limits(self, before: Mapping[str, Any]) -> dict[str, Any]:
        return {"num_frames": self.count if self.fps is None else None, "fps": self.fps}

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        wanted = self.count if self.fps is None else max(1, int(size.seconds * self.fps))
        wanted = min(wanted, size.frames) if size.seconds else size.frames
        return np.arange(wanted) * size.frames // wanted


@dataclass(frozen=True, slots=True)
class SpreadFrames:
    """Select `fps` frames per second, at most `most`, evenly from the first to the last frame; a long clip loses its
    first and last second (SmolVLM)."""

    fps: float = 1.0
    most: int = 64

    def limits(self, before: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"num_frames": self.most, "fps": self.fps}
        if "video_sampling" in before:
            found["video_sampling"] = {**before["video_sampling"], "max_frames": self.most, "fps": self.fps}
        return found

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        if not size.seconds:
            return np.arange(size.frames)
        wanted = max(1, min(round(self.fps * size.seconds), self.most))
        first, last = 0, size.frames - 1
        if size.seconds - 2 > self.most * self.fps:
            rate = size.frames / size.seconds
            first, last = int(rate), min(int(size.frames - rate), last)
            if first >= last:
                first, last = 0, size.frames - 1
        return np.unique(np.linspace(first, last, wanted, dtype=np.int64))


FrameTexts = Callable[[MediaSize, NDArray[np.int64]], list[tuple[str, str]]]
"""Function of a clip and its selected frames: the texts before and after each frame."""


def counted(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return InternVL's texts: one numbered line per frame."""
    count = len(frames)
    return [(f"Frame{number}: ", "\n" if number < count else "") for number in range(1, count + 1)]


def timed(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return Gemma 4's texts: minutes and seconds before each frame."""
    count = len(frames)
    return [
        (f"{_clock(moment)} ", " " if number < count else "")
        for number, moment in enumerate(moments(size, frames).tolist(), 1)
    ]


def introduced(size: MediaSize, frames: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Return SmolVLM's texts: number of frames and duration of the clip, then minutes and seconds before each frame."""
    at = moments(size, frames).tolist()
    length = timedelta(seconds=int(size.seconds or at[-1]))
    head = f"You are provided the following series of {in_words(len(at))} frames from a {length} [H:MM:SS] video.\n"
    texts = [(f"\nFrame from {_clock(moment)}:", "") for moment in at]
    (first, _), (last, _) = texts[0], texts[-1]
    texts[0] = (head + first, "")
    texts[-1] = (texts[-1][0] if len(texts) == 1 else last, "\n\n")
    return texts


FRAME_TEXTS: Mapping[str, FrameTexts] = {"counted": counted, "timed": timed, "introduced": introduced}
"""Frame texts by the name that families use for them."""

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
         "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """Write a number from 0 to thousands in English: 121 is "one hundred and twenty-one"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    many, rest = divmod(number, 100 if number < 1000 else 1000)
    joint = " and " if rest < 100 else ", "
    unit = "hundred" if number < 1000 else "thousand"
    return f"{in_words(many)} {unit}" + (joint + in_words(rest) if rest else "")


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


@dataclass(frozen=True, slots=True)
class FramedClipUnit(PiecedClipUnit):
    """Media unit for clips. frame: the unit for one frame, with the texts around an image. choice: selects the frames.
    texts: key in `FRAME_TEXTS` of the additional texts."""

    frame: ImageUnit | TiledImageUnit | ProcessedImageUnit
    choice: FrameChoice
    texts: str
    marker: str = "<video>"
    written: MediaMarkup | None = None

    @property
    def name(self) -> str:
        return self.frame.name

    @property
    def placeholder_id(self) -> int:
        return self.frame.placeholder_id

    def grid(self, size: MediaSize) -> dict[str, EncoderInput]:
        """Return the frames' inputs that later stages of the encoder need, from the clip's size."""
        count = len(self.choice.frames(size))
        one = self.frame.grid(_of_frame(size))
        return {name: concatenate_inputs([array] * count) for name, array in one.items()}

    def encoder_tokens(self, size: MediaSize) -> int:
        return len(self.choice.frames(size)) * self.frame.encoder_tokens(_of_frame(size))

    def saved_settings(self, before: Mapping[str, Any], is_requested: bool) -> dict[str, Any]:
        return {**saved_limits(self.choice, before), **getattr(self.frame.processor, "limits", {})}

    def merged_tokens(self, size: MediaSize) -> int:
        return len(self.choice.frames(size)) * self.frame.merged_tokens(_of_frame(size))

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """Return, for each frame, the text before its tokens, the number of its tokens, and the text after them."""
        image = self.frame.written or MediaMarkup("")
        tokens = self.frame.merged_tokens(_of_frame(size))
        return [
            (before + image.opens, tokens, image.closes + after)
            for before, after in FRAME_TEXTS[self.texts](size, self.choice.frames(size))
        ]

    def process(self, media: Media, size: MediaSize) -> dict[str, EncoderInput]:
        """Decode the frames into the inputs of images, concatenated."""
        frames = self.choice.frames(size)
        made = decode_clip(media, frames.tolist(), self.frame.see)
        return {name: concatenate_inputs([each[name] for each in made]) for name in made[0]}


def _of_frame(size: MediaSize) -> MediaSize:
    return replace(size, frames=0, seconds=0.0, stamps=())
