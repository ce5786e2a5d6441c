"""Clips as frames that are images by themselves: which frames, what is written around them, and their pixels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from dilatant.data.framed_clip_unit import FramedClipUnit, MiddleFrames
from dilatant.data.image_unit import PixelProcessor
from dilatant.data.pixels import as_array
from dilatant.data.sample import Media, MediaSize


@pytest.mark.parametrize(("count", "fps"), [(8, None), (3, None), (20, None), (None, 1.0), (None, 2.5)])
@pytest.mark.parametrize("total", [20, 41, 300])
def test_frames_are_those_that_the_familys_processor_samples(
    total: int, count: int | None, fps: float | None
) -> None:
    seconds = total / 10
    # What its processor computes, which is not to be had without torchvision.
    wanted = int(total / 10.0 * fps) if count is None else count
    theirs = torch.arange(total / wanted / 2, total, total / wanted).int()
    ours = MiddleFrames(count, fps or 1.0).frames(MediaSize(8, 8, seconds, total))
    assert ours.tolist() == theirs.tolist()


def test_frames_are_written_and_seen_as_the_family_does(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 14, 20, 3), np.uint8)
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(tmp_path / "clip.png", save_all=True, append_images=others, duration=100)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    unit = FramedClipUnit(
        "vision",
        9,
        17,
        4,
        PixelProcessor(8, 8, mean=mean, std=std),
        MiddleFrames(4),
        around_frame=("<i>", "</i>"),
    )
    size = MediaSize(20, 14, 0.9, 9)
    seen = unit.sampling.frames(size)
    text = "".join(f"{before}{'x' * tokens}{after}" for before, tokens, after in unit.pieces(size))
    like = SimpleNamespace(
        start_image_token="<i>", end_image_token="</i>", image_token="x", image_seq_length=4
    )
    inputs = {"pixel_values_videos": [np.zeros((4, 3, 8, 8))]}
    assert text == InternVLProcessor.replace_video_token(like, inputs, 0)
    assert unit.encoder_tokens(size) == 4 * 17
    assert unit.merged_tokens(size) == 4 * 4
    made = unit.process(Media("video", tmp_path / "clip.png", "clip"))
    processor = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, image_mean=mean, image_std=std)
    theirs = processor(images=[frames[at] for at in seen], return_tensors="np")["pixel_values"]
    # The same bytes of Pillow, normalised in another order of float32 operations.
    np.testing.assert_allclose(as_array(made["pixel_values"]), theirs, atol=1e-6, rtol=0)
