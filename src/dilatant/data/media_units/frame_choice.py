"""Which frames of a clip are seen as images, by the rules of the families that see frames so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dilatant.data.sample import MediaSize

UNTIMED_FPS = 24.0
"""Frames a second that the families reckon with where a clip does not say: pictures that are sampled already."""


class FrameChoice(Protocol):
    """A rule; its repr tells rules apart."""

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        """Numbers of the frames that are seen, rising; all of pictures that are sampled already."""
        ...


def moments(size: MediaSize, frames: NDArray[np.int64]) -> NDArray[np.float64]:
    """When these frames are, in seconds."""
    if size.stamps:
        return np.array(size.stamps)[frames]
    return frames / (size.frames / size.seconds if size.seconds else UNTIMED_FPS)


@dataclass(frozen=True, slots=True)
class MiddleFrames:
    """From the middle of as many equal parts of the clip (InternVL). count: of them; None: `fps` of them a second. Of
    shorter clips, all."""

    count: int | None = None
    fps: float = 1.0

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        wanted = self.count
        if wanted is None and size.seconds:
            wanted = max(1, int(size.seconds * self.fps))
        if wanted is None or not size.seconds or wanted >= size.frames:
            return np.arange(size.frames)
        step = size.frames / wanted
        # In float32, as the family has it.
        return np.arange(step / 2, size.frames, step).astype(np.float32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """The first of as many equal parts of the clip (transformers' common rule: Gemma 4, LLaVA-OneVision). fps: of them
    a second; None: `count` of them. Of shorter clips, all."""

    count: int = 32
    fps: float | None = None

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        wanted = self.count if self.fps is None else max(1, int(size.seconds * self.fps))
        wanted = min(wanted, size.frames) if size.seconds else size.frames
        return np.arange(wanted) * size.frames // wanted


@dataclass(frozen=True, slots=True)
class SpreadFrames:
    """From the first to the last, `fps` of them a second and no more than `most`; of a long clip without its first and
    last second (SmolVLM)."""

    fps: float = 1.0
    most: int = 64

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
