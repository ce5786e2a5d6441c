"""Clips that a model's own processor prepares: sizes before decoding, the text between frames, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dilatant.data.media.media_header import media_size
from dilatant.data.media_units.processed_clip_unit import HuggingFaceClipProcessor, ProcessedClipUnit
from dilatant.data.media_units.processed_unit import IS_CLIP, SHAPE
from dilatant.data.sample import Frames, Media, MediaSize


class VideoProcessor:
    """Two frames a second, each pair a patch of time of four patches of space."""

    do_sample_frames = True
    fps = 2

    class valid_kwargs:
        do_sample_frames: bool
        fps: float

    def sample_frames(self, metadata: Any, fps: float) -> Any:
        return np.arange(0, metadata.total_num_frames, metadata.fps / fps)

    def __call__(self, videos: list[Any], **settings: Any) -> dict[str, Any]:
        times = len(videos[0]) // 2
        pixels = np.full((4 * times, 6), videos[0].mean(), np.float32)
        grid = np.array([[times, 2, 2]])
        return {"pixel_values_videos": pixels, "video_grid_thw": grid, "not read": 1}


class Processor:
    video_processor = VideoProcessor()

    def replace_video_token(self, inputs: Mapping[str, Any], video_idx: int) -> str:
        timing = inputs["video_metadata"][video_idx]
        times = range(int(inputs["video_grid_thw"][video_idx][0]))
        return "".join(f"[<dilatant:video>]{timing.frames_indices[2 * each] / timing.fps:.1f}s" for each in times)


class Unknown(Processor):
    def replace_video_token(self, inputs: Mapping[str, Any], video_idx: int) -> str:
        name = "start_token"
        return str(getattr(self, name))


class Silent(Processor):
    def replace_video_token(self, inputs: Mapping[str, Any], video_idx: int) -> str:
        raise NotImplementedError


class Counts:
    def __call__(self, item: Mapping[str, Any]) -> tuple[int, int]:
        times = int(item["video_grid_thw"][0][0])
        return 4 * times, times

    def __hash__(self) -> int:
        return 1


def unit_of(processor: type[Processor]) -> ProcessedClipUnit:
    class Here(HuggingFaceClipProcessor):
        @property
        def made(self) -> Any:
            return processor()

    own = Here("{}", "a family", ("pixel_values_videos", "video_grid_thw"))
    return ProcessedClipUnit("vision", 5, own, Counts())


def clip(brightness: list[int]) -> Media:
    pictures = []
    for each in brightness:
        file = BytesIO()
        Image.new("RGB", (8, 6), (each, each, each)).save(file, "png")
        pictures.append(Media("image", file.getvalue(), "frame"))
    return Media("video", Frames(tuple(pictures), fps=2.0), "clip")


def test_sizes_and_texts_are_known_before_decoding() -> None:
    size = MediaSize(8, 6, 2.0, 48)
    unit = unit_of(Processor)
    assert (unit.encoder_tokens(size), unit.merged_tokens(size)) == (8, 2)
    assert unit.pieces(size) == [("[", 1, ""), ("]0.0s[", 1, "]1.0s")]


def test_a_clip_has_the_inputs_that_its_size_promises() -> None:
    media, unit = clip([10, 20, 30, 40]), unit_of(Processor)
    inputs = unit.process(media, media_size(media))
    assert {*inputs} == {name + end for name in unit.processor.names for end in ("", SHAPE)} | {IS_CLIP}
    assert np.asarray(inputs["pixel_values_videos"]).mean() == 25
    for name, promised in unit.grid(media_size(media)).items():
        assert np.array_equal(np.asarray(inputs[name]), np.asarray(promised))


def test_a_processor_without_texts_writes_one_run() -> None:
    assert unit_of(Silent).pieces(MediaSize(8, 6, 2.0, 48)) == [("", 2, "")]


def test_tokens_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="writes its start_token around frames"):
        unit_of(Unknown).pieces(MediaSize(8, 6, 2.0, 48))
