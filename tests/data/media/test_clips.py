"""Clips: sizes from headers alone, frames and patches as the families choose and cut them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from dilatant.config.errors import UserError
from dilatant.data.errors import MediaError
from dilatant.data.media.clip import decode_clip
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import as_array
from dilatant.data.media_units.native_clip_unit import FrameSampling, NativeClipUnit, frame_sampling
from dilatant.data.media_units.native_image_unit import GRID, STEP, PatchProcessor
from dilatant.data.sample import Media, MediaMarkup, MediaSize

FORMS = ("gif", "webp", "folder", "mp4")


def pictures(count: int) -> np.ndarray:
    """Grey frames, each of its own shade, that lossy codecs keep apart."""
    shades = np.linspace(20, 230, count).astype(np.uint8)
    return np.broadcast_to(shades[:, None, None, None], (count, 48, 64, 3))


def write(folder: Path, form: str, frames: np.ndarray, fps: int = 10) -> Media:
    path = folder / f"clip.{form}"
    images = [Image.fromarray(np.ascontiguousarray(frame)) for frame in frames]
    if form == "folder":
        path.mkdir()
        for number, image in enumerate(images):
            image.save(path / f"{number:03}.png")
    elif form == "mp4":
        av = pytest.importorskip("av")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=fps)
            stream.height, stream.width = frames.shape[1:3]
            for image in images:
                container.mux(stream.encode(av.VideoFrame.from_image(image)))
            container.mux(stream.encode())
    else:
        images[0].save(path, save_all=True, append_images=images[1:], duration=1000 // fps, lossless=True)
    return Media("video", path, form)


@pytest.mark.parametrize("form", FORMS)
def test_clip_headers_give_sizes_and_any_frame_decodes(form: str, tmp_path: Path) -> None:
    frames = pictures(12)
    media = write(tmp_path, form, frames)
    size = media_size(media)
    seconds = 0 if form == "folder" else 1.2
    assert (size.width, size.height, size.frames) == (64, 48, 12)
    assert size.seconds == pytest.approx(seconds)
    chosen = [0, 5, 5, 11]
    made = decode_clip(media, chosen, lambda frame: frame)
    for frame, expected in zip(made, frames[chosen], strict=True):
        assert np.abs(frame.astype(int) - expected).max() <= 6  # MPEG rounds; frames are 19 apart


def test_what_is_no_clip_or_is_cut_off_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.mp4").write_text("no video at all")
    for name, text in (("empty", "folder without pictures"), ("text.mp4", "cannot be read"), ("gone.mp4", "not exist")):
        with pytest.raises(MediaError, match=text):
            media_size(Media("video", tmp_path / name, name))
    media = write(tmp_path, "mp4", pictures(40))
    whole = Path(str(media.source)).read_bytes()
    for share in (0.3, 0.6):
        (tmp_path / "cut.mp4").write_bytes(whole[: int(len(whole) * share)])
        cut = Media("video", tmp_path / "cut.mp4", "cut")
        with pytest.raises(MediaError):
            decode_clip(cut, [39], lambda frame: frame)


@pytest.mark.parametrize("total", [1, 2, 3, 5, 30, 301, 5000])
@pytest.mark.parametrize("rate", [1, 24, 29.97])
def test_frames_are_those_that_the_families_sample(total: int, rate: float) -> None:
    metadata: Any = SimpleNamespace(total_num_frames=total, fps=rate)
    settings = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    size = MediaSize(64, 48, total / rate, total)
    theirs = Qwen3VLVideoProcessor.sample_frames(settings, metadata)  # type: ignore[arg-type]
    np.testing.assert_array_equal(FrameSampling().frames(size, 2, to_end=True), theirs)


@pytest.mark.parametrize(
    ("total", "rate", "count", "first"),
    [
        (301, 24, 24, [0, 12, 25]),  # 12.54 s at 2 a second is 25, of which 24 are pairs
        (30, 24, 4, [0, 7, 15]),  # no fewer than 4
        (3, 24, 2, [0, 1]),
        (1, 24, 1, [0]),  # which is seen twice
        (5000, 1, 768, [0, 6, 13]),  # no more than 768
    ],
)
def test_qwen2_sees_pairs_of_evenly_spaced_frames(total: int, rate: int, count: int, first: list[int]) -> None:
    """Its processor wants torchvision, which is not asked for here."""
    frames = FrameSampling().frames(MediaSize(64, 48, total / rate, total), 2)
    assert len(frames) == count
    assert frames[:3].tolist() == first


def clip_unit(**options: Any) -> NativeClipUnit:
    return NativeClipUnit("vision", 9, PatchProcessor(min_pixels=28 * 28, max_pixels=8 * 28 * 28), **options)


def test_patches_are_those_of_the_frames_pair_by_pair(tmp_path: Path) -> None:
    """Of each frame alone transformers makes patches of twice that frame: a clip's have one half of each."""
    frames = np.random.default_rng(0).integers(0, 256, (5, 40, 90, 3), np.uint8)
    media = write(tmp_path, "folder", frames)
    unit = clip_unit()
    made = unit.process(media, media_size(media))
    limits = {"min_pixels": 28 * 28, "max_pixels": 8 * 28 * 28}
    theirs = Qwen2VLImageProcessorPil(**limits)(images=list(frames), return_tensors="np")
    each = theirs["pixel_values"].reshape(5, -1, 3, 2, 14, 14)
    pairs = [(0, 1), (2, 3), (4, 4)]  # all pictures of a folder, the last one twice
    expected = np.concatenate([np.stack([each[a, :, :, 0], each[b, :, :, 0]], 2) for a, b in pairs])
    ours = as_array(made["pixel_values"]).reshape(expected.shape)
    np.testing.assert_allclose(ours, expected, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(unit.grid(media_size(media))[GRID], made[GRID])
    assert unit.encoder_tokens(media_size(media)) == len(as_array(made["pixel_values"]))


def test_frames_that_stand_apart_are_sized_and_dated_as_in_qwen3() -> None:
    size = MediaSize(640, 360, 10.3, 309)
    opens = MediaMarkup("<video>", "<v>", "</v>")
    unit = NativeClipUnit("vision", 9, PatchProcessor(16, 2, 2, 4096, 40 * 64 * 64), apart=True, written=opens)
    frames = unit.frames(size)
    rows, columns = smart_resize(len(frames), 360, 640, 2, 32, 4096, 40 * 64 * 64)
    grid = unit.grid(size)[GRID]
    np.testing.assert_array_equal(grid, [[1, rows // 16, columns // 16]] * (len(frames) // 2))
    moments = Qwen3VLProcessor._calculate_timestamps(None, frames, 309 / 10.3)  # type: ignore[arg-type]
    each = rows // 32 * (columns // 32)
    assert unit.pieces(size) == [(f"<{moment:.1f} seconds><v>", each, "</v>") for moment in moments]
    assert sum(tokens for _, tokens, _ in unit.pieces(size)) == unit.merged_tokens(size)


def test_clip_positions_follow_seconds_where_family_scales_time() -> None:
    size = MediaSize(56, 56, 8.0, 200)  # 25 frames a second, of which 2 are seen
    assert clip_unit().grid(size)[STEP] == 1
    assert clip_unit(time_scale=2.0).grid(size)[STEP] == pytest.approx(2.0)  # 2 positions a second, 2 frames a patch


def test_limits_go_by_the_names_people_know() -> None:
    assert frame_sampling({"video_fps": 1, "video_maxlen": 16}) == FrameSampling(1.0, 4, 16)
    assert frame_sampling({"fps": 0.5, "max_frames": 2}) == FrameSampling(0.5, 2, 2)
    for key, value in (("fps", 0), ("fps", "two"), ("max_frames", float("nan")), ("video_max_pixels", "4k")):
        with pytest.raises(UserError, match=f"{key} is .*must be a number above 0"):
            frame_sampling({key: value})
    with pytest.raises(UserError, match="no more than max_frames 3"):
        frame_sampling({"min_frames": 4, "max_frames": 3})
