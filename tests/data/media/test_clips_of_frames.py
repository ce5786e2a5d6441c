"""Clips as frames that are images by themselves: which frames, what is written around them, and their pixels."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.video_utils import VideoMetadata

from cases.data_builders import small_encoding
from dilatant.config.errors import UserError
from dilatant.data.media import media_header
from dilatant.data.media.pixels import as_array
from dilatant.data.media_units.frame_choice import (
    FRAME_TEXTS,
    FirstFrames,
    FramedClipUnit,
    MiddleFrames,
    SpreadFrames,
    in_words,
)
from dilatant.data.media_units.image_unit import ImageUnit, PixelProcessor
from dilatant.data.sample import Media, MediaMarkup, MediaSize, Sample, Turn
from dilatant.data.text.encode import encode_sample
from dilatant.models.encoders.media import frame_choice


@pytest.mark.parametrize(("count", "fps"), [(8, None), (3, None), (20, None), (None, 1.0), (None, 2.5)])
@pytest.mark.parametrize("total", [20, 41, 300])
def test_frames_are_those_that_the_familys_processor_samples(total: int, count: int | None, fps: float | None) -> None:
    seconds = total / 10
    size = MediaSize(8, 8, seconds, total)
    # What its processor computes, which is not to be had without torchvision.
    wanted = int(total / 10.0 * fps) if count is None else count
    theirs = torch.arange(total / wanted / 2, total, total / wanted).int()
    assert MiddleFrames(count, fps or 1.0).frames(size).tolist() == theirs.tolist()
    # The library's own rule: n * total // count.
    ours = FirstFrames(count or 32, fps).frames(size).tolist()
    assert ours == [number * total // wanted for number in range(wanted)]
    module = importlib.import_module("transformers.models.smolvlm.video_processing_smolvlm")
    rule: Any = module.SmolVLMVideoProcessor.sample_frames
    meta = VideoMetadata(total_num_frames=total, fps=10.0, duration=seconds)
    most = count or 64
    like = SimpleNamespace(num_frames=most, fps=fps or 1.0)
    ours = SpreadFrames(fps or 1.0, most).frames(size).tolist()
    assert ours == rule(like, meta).tolist()


def test_sampled_frames_and_short_clips_keep_every_frame() -> None:
    for choice in (MiddleFrames(4), FirstFrames(4), SpreadFrames(1.0, 4)):
        assert choice.frames(MediaSize(8, 8, 0.0, 9)).tolist() == list(range(9))
        assert choice.frames(MediaSize(8, 8, 0.04, 1)).tolist() == [0]
    assert FirstFrames(32).frames(MediaSize(8, 8, 3.0, 5)).tolist() == list(range(5))


@pytest.mark.parametrize("seconds", [3.0, 130.0, 3671.0])
def test_frames_are_written_as_their_familys_processor_does(seconds: float) -> None:
    name = "transformers.models.{0}.processing_{0}"  # earlier versions want torchvision for their text
    gemma4 = pytest.importorskip(name.format("gemma4"), exc_type=ImportError)
    smolvlm = pytest.importorskip(name.format("smolvlm"), exc_type=ImportError)
    size = MediaSize(20, 14, seconds, round(seconds * 10))
    frames = FirstFrames(7).frames(size)

    def ours(texts: str, opens: str, closes: str) -> str:
        return "".join(f"{before}{opens}xx{closes}{after}" for before, after in FRAME_TEXTS[texts](size, frames))

    meta = VideoMetadata(total_num_frames=size.frames, fps=10.0, duration=seconds, frames_indices=frames.tolist())
    like: Any = SimpleNamespace(boi_token="<b>", eoi_token="<e>", video_token="x")
    given = {"num_soft_tokens_per_video": [2], "video_metadata": [meta]}
    replaced = gemma4.Gemma4Processor.replace_video_token(like, given, 0)
    assert ours("timed", "<b>", "<e>") == replaced

    like = SimpleNamespace(image_seq_len=2, image_token="x", fake_image_token="<f>", global_image_token="<g>")
    words, smolvlm.num2words = smolvlm.num2words, lambda number: "seven"
    try:
        given = {"pixel_values": np.zeros((1, 7, 3, 8, 8)), "video_metadata": [meta]}
        replaced = smolvlm.SmolVLMProcessor.replace_video_token(like, given, 0)
    finally:
        smolvlm.num2words = words
    assert ours("introduced", "<f><g>", "<f>") == replaced


def test_numbers_are_written_as_num2words_does() -> None:
    written = {
        0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred", 101: "one hundred and one",
        768: "seven hundred and sixty-eight", 1005: "one thousand and five", 2100: "two thousand, one hundred",
    }  # fmt: skip
    assert {number: in_words(number) for number in written} == written


def test_frames_are_seen_as_images_and_written_as_internvl_does(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (9, 14, 20, 3), np.uint8)
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(tmp_path / "clip.png", save_all=True, append_images=others, duration=100)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = ImageUnit(
        "vision", 9, 17, PixelProcessor(8, 8, mean=mean, std=std), 4, written=MediaMarkup("", "<i>", "</i>")
    )
    unit = FramedClipUnit(image, MiddleFrames(4), "counted")
    size = MediaSize(20, 14, 0.9, 9)
    seen = unit.choice.frames(size)
    text = "".join(f"{before}{'x' * tokens}{after}" for before, tokens, after in unit.pieces(size))
    like = SimpleNamespace(start_image_token="<i>", end_image_token="</i>", image_token="x", image_seq_length=4)
    inputs = {"pixel_values_videos": [np.zeros((4, 3, 8, 8))]}
    assert text == InternVLProcessor.replace_video_token(like, inputs, 0)
    assert unit.encoder_tokens(size) == 4 * 17
    assert unit.merged_tokens(size) == 4 * 4
    made = unit.process(Media("video", tmp_path / "clip.png", "clip"), size)
    processor = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8}, image_mean=mean, image_std=std)
    theirs = processor(images=[frames[at] for at in seen], return_tensors="np")["pixel_values"]
    # The same bytes of Pillow, normalised in another order of float32 operations.
    np.testing.assert_allclose(as_array(made["pixel_values"]), theirs, atol=1e-6, rtol=0)


def test_the_header_of_a_clip_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its texts, its sizes and its frames: without an index in the file, all of it is read for its length."""
    frames = [Image.new("RGB", (20, 14), (at, 0, 0)) for at in range(4)]
    frames[0].save(tmp_path / "clip.png", save_all=True, append_images=frames[1:], duration=500)
    read: list[Media] = []
    size_of = media_header._SIZE["video"]
    monkeypatch.setitem(media_header._SIZE, "video", lambda media: read.append(media) or size_of(media))
    one = ImageUnit("vision", 9, 17, PixelProcessor(height=8, width=8), merged_per_image=4)
    clip = Media("video", tmp_path / "clip.png", "clip")
    sample = Sample("s", (Turn("user", (clip,)), Turn("assistant", ("red",))))
    unit = FramedClipUnit(one, MiddleFrames(2), "counted")
    encoded = encode_sample(sample, small_encoding(units=(unit,)))
    assert len(encoded.media["vision"]["pixel_values"]) == 2
    assert read == [clip]


def test_what_is_asked_of_frames_goes_before_what_the_files_say() -> None:
    saved = {"num_frames": 16, "fps": None}
    assert frame_choice("timed", saved, {}) == FirstFrames(16)
    assert frame_choice("timed", saved, {"max_frames": 4}) == FirstFrames(4)
    assert frame_choice("pooled", saved, {"video_fps": 2}) == FirstFrames(32, 2.0)
    assert frame_choice("pooled", {}, {}) == FirstFrames(32)
    hub = {"video_sampling": {"fps": 2, "max_frames": 48}, "num_frames": None}
    assert frame_choice("introduced", hub, {}) == SpreadFrames(2.0, 48)
    assert frame_choice("introduced", hub, {"num_frames": 5}) == SpreadFrames(2.0, 5)
    for wrong in (True, 0, -1, "many", float("nan")):
        with pytest.raises(UserError, match="num_frames"):
            frame_choice("counted", {}, {"num_frames": wrong})
