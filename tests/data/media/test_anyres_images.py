"""Images in tiles by their shape: tiles as transformers' processor makes them, rows as its model lays them out."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from dilatant.data.media_units.anyres_image_unit import AnyresImageUnit, AnyresShape
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.sample import Media, MediaSize

TILE, SIDE = 32, 4
PINPOINTS = [[TILE * tall, TILE * wide] for tall in range(1, 5) for wide in range(1, 5)]
SHAPE = AnyresShape(tuple((tall, wide) for tall, wide in PINPOINTS), TILE, SIDE, 9)
SETTINGS = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": TILE, "width": TILE},
    "image_grid_pinpoints": PINPOINTS,
}


def test_rows_are_those_that_the_family_lays_out() -> None:
    generator = np.random.default_rng(0)
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=TILE, patch_size=TILE // SIDE), image_grid_pinpoints=PINPOINTS
    )
    family: Any = SimpleNamespace(config=config)
    sizes = [(1, 1), (1, 190), (300, 2), *generator.integers(5, 700, (120, 2)).tolist()]
    for height, width in sizes:
        for alone in (True, False):
            tiles = 1 + int(np.prod(SHAPE.tiles(height, width))) if alone else 1
            features = [torch.zeros(tiles, SIDE**2, 2)]
            _, (rows,) = LlavaOnevisionModel.pack_image_features(
                family, features, torch.tensor([[height, width]]), torch.ones(2), "anyres_max_9"
            )
            assert SHAPE.rows(height, width, alone) == int(rows), (height, width, alone)


@pytest.mark.parametrize(("height", "width"), [(20, 90), (100, 33), (64, 64)])
def test_image_size_gives_tiles_and_several_images_get_one_each(height: int, width: int, tmp_path: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    unit = AnyresImageUnit("vision", 9, SIDE**2, SHAPE, HuggingFaceImageProcessor(json.dumps(SETTINGS)))
    for alone in (True, False):
        size = MediaSize(width, height, alone=alone)
        made = unit.process(Media("image", tmp_path / "image.png", "image"), size)
        tiles = np.asarray(made["pixel_values"])
        assert tiles.shape == (unit.encoder_tokens(size) // SIDE**2, 3, TILE, TILE)
        np.testing.assert_array_equal(made["image_sizes"], unit.grid(size)["image_sizes"])
    assert len(tiles) == 1
