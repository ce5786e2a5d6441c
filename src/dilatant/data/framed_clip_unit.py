"""How towers of fixed size see clips: some frames, each as an image by itself, which the text counts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dilatant.data.clip import Frame, decode_clip
from dilatant.data.image_unit import PixelProcessor
from dilatant.data.media import media_size
from dilatant.data.pixels import EncoderInput, joined
from dilatant.data.sample import Media, MediaKind, MediaSize, Written


@dataclass(frozen=True, slots=True)
class MiddleFrames:
    """Which frames are seen: from the middle of as many equal parts of the clip. count: of them; None: `fps` of them a
    second. Of pictures that are sampled already, and of shorter clips, all."""

    count: int | None = None
    fps: float = 1.0

    def frames(self, size: MediaSize) -> NDArray[np.int64]:
        """Their numbers."""
        wanted = self.count
        if wanted is None and size.seconds:
            wanted = max(1, int(size.seconds * self.fps))
        if wanted is None or not size.seconds or wanted >= size.frames:
            return np.arange(size.frames)
        step = size.frames / wanted
        # In float32, as the family has it.
        return np.arange(step / 2, size.frames, step).astype(np.float32).astype(np.int64)


@dataclass(frozen=True, slots=True)
class FramedClipUnit:
    """A `MediaUnit`: every frame is one encoder row of `tokens_per_frame`, of which `merged_per_frame` reach the
    language model, after "Frame1: " and so on, a line each (InternVL)."""

    name: str
    placeholder_id: int
    tokens_per_frame: int
    merged_per_frame: int
    processor: PixelProcessor
    sampling: MiddleFrames = MiddleFrames()
    marker: str = "<video>"
    written: Written | None = None
    around_frame: tuple[str, str] = ("", "")
    merge: Literal["placeholder", "prepend"] = "placeholder"
    kind: MediaKind = "video"

    @property
    def fingerprint(self) -> str:
        parts = (self.name, self.placeholder_id, self.tokens_per_frame, self.merged_per_frame, self.marker,
                 self.written, self.around_frame, self.sampling, self.processor.fingerprint)  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def encoder_tokens(self, size: MediaSize) -> int:
        return len(self.sampling.frames(size)) * self.tokens_per_frame

    def merged_tokens(self, size: MediaSize) -> int:
        return len(self.sampling.frames(size)) * self.merged_per_frame

    def pieces(self, size: MediaSize) -> list[tuple[str, int, str]]:
        """How a clip stands in the text, frame by frame: what is written before its tokens, how many, and what after
        them."""
        opens, closes = self.around_frame
        count = len(self.sampling.frames(size))
        ends = ["\n"] * (count - 1) + [""]
        return [
            (f"Frame{number}: {opens}", self.merged_per_frame, f"{closes}{end}")
            for number, end in enumerate(ends, 1)
        ]

    def process(self, media: Media) -> dict[str, EncoderInput]:
        """`pixel_values`: [frames, channels, height, width]."""
        from PIL import Image

        numbers = self.sampling.frames(media_size(media)).tolist()
        size = (self.processor.width, self.processor.height)
        resample = Image.Resampling[self.processor.resample.upper()]

        def fit(frame: Frame) -> Frame:
            return np.asarray(Image.fromarray(frame).resize(size, resample))

        frames = decode_clip(media, numbers, fit)
        return {"pixel_values": joined([self.processor(frame)["pixel_values"] for frame in frames])}
