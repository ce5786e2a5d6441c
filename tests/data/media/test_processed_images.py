"""Images that a model's own processor prepares: sizes by its rule where it has one, by a blank image where not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dilatant.data.media_units.processed_unit import Arrays, ProcessedImageUnit
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.sample import MediaSize


class CountsPixels:
    """Counts tokens by the pixels of an item, and how often it is asked."""

    def __init__(self, pixels: int) -> None:
        self.pixels = pixels
        self.asked = 0

    def __call__(self, item: Arrays) -> tuple[int, int]:
        self.asked += 1
        tokens = np.asarray(item["pixel_values"]).size // self.pixels
        return tokens, tokens // 4


class CountsPlaces(CountsPixels):
    """Counts the patches that are no padding as tokens of the text."""

    def __call__(self, item: Arrays) -> tuple[int, int]:
        tokens, _ = super().__call__(item)
        return tokens, int((np.asarray(item["image_position_ids"])[..., 0] >= 0).sum()) // 9


KINDS = [
    pytest.param({"image_processor_type": "Glm4vImageProcessor"}, 14 * 14 * 3 * 2, True, id="patches"),
    pytest.param(
        {"image_processor_type": "Gemma4ImageProcessor"}, 16 * 16 * 3, True, id="padded patches, a rule of tokens"
    ),
    pytest.param({"image_processor_type": "SiglipImageProcessor"}, 16 * 16 * 3, True, id="one size"),
    pytest.param(
        {"image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "size": {"height": 64, "width": 64}},
        8 * 8 * 3,
        True,
        id="tiles",
    ),
    pytest.param(
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 96}},
        16 * 16 * 3,
        False,
        id="no rule",
    ),
]


@pytest.mark.parametrize(("settings", "pixels", "has_rule"), KINDS)
def test_sizes_follow_the_processors_rule_or_a_blank_image(settings: Any, pixels: int, has_rule: bool) -> None:
    processor = HuggingFaceImageProcessor(json.dumps(settings))
    kind = CountsPlaces if "Gemma4" in settings["image_processor_type"] else CountsPixels
    count = kind(pixels)
    unit = ProcessedImageUnit("vision", 9, processor, count)
    sizes = [MediaSize(width, height) for width, height in ((40, 900), (333, 127), (640, 480), (61, 62))]
    found = [(unit.encoder_tokens(size), unit.merged_tokens(size)) for size in sizes]
    assert count.asked == 6 + (0 if has_rule else len(sizes))  # the six of `_PROBES`, without a rule also each size
    for size, own in zip(sizes, found, strict=True):
        blank = np.full((size.height, size.width, 3), 128, np.uint8)
        assert own == kind(pixels)(processor(blank))
