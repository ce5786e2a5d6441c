"""Images of native resolution: patches as transformers makes them, and their number told from the size alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dilatant.config.errors import UserError
from dilatant.data.media.media_header import media_size
from dilatant.data.media.pixels import as_array
from dilatant.data.media_units.native_image_unit import GRID, NativeImageUnit, patch_processor
from dilatant.data.sample import Media, MediaSize

SETTINGS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
SIZES = [(28, 28), (1, 1), (9, 300), (640, 480), (31, 41), (1400, 60), (333, 1001), (56, 56), (57, 13)]


def unit(**settings: object) -> NativeImageUnit:
    return NativeImageUnit("vision", 9, patch_processor(settings, patch=14, merge=2, frames=2))


@pytest.mark.parametrize("limits", [{}, {"min_pixels": 3000, "max_pixels": 90_000}], ids=["own", "given"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_patches_are_those_of_transformers(width: int, height: int, limits: dict[str, int], tmp_path: Path) -> None:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    media = Media("image", tmp_path / "image.png", "image")
    native = unit(**SETTINGS, **limits)
    made = native.process(media, media_size(media))
    processor = Qwen2VLImageProcessorPil(**SETTINGS, **limits)
    theirs = processor(images=pixels, return_tensors="np", input_data_format="channels_last")
    np.testing.assert_array_equal(made[GRID], theirs[GRID])
    ours = as_array(made["pixel_values"]).reshape(len(theirs["pixel_values"]), -1)
    # The same bytes of Pillow, normalised in another order of float32 operations.
    np.testing.assert_allclose(ours, theirs["pixel_values"], atol=1e-6, rtol=0)
    size = media_size(media)
    assert native.encoder_tokens(size) == len(ours)
    assert native.merged_tokens(size) == len(ours) // 4
    np.testing.assert_array_equal(native.grid(size)[GRID], made[GRID])


def test_unusable_image_sizes_and_settings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="longer than 200 times"):
        unit().encoder_tokens(MediaSize(width=4021, height=20))
    with pytest.raises(UserError, match=r"min_pixels 9000 must be .* no more than max_pixels 8000"):
        unit(min_pixels=9000, max_pixels=8000)
    with pytest.raises(UserError, match="patch_size is 16, but the encoder has 14"):
        unit(patch_size=16)
    for wrong in ({"size": 5}, {"resample": 99}, {"resample": "bicubic"}, {"max_pixels": "many"}, {"image_mean": 0.5}):
        with pytest.raises(UserError, match=r"model.processor: "):
            unit(**wrong)
