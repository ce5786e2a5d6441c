"""Towers that merge their rows themselves are encoders of any language model: what they say of packed items is what
transformers says of each alone, whole or in stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cases.often import often
from cases.tiny_models import LANGUAGE_MODELS
from cases.tiny_wholes import WHOLES
from dilatant.config.errors import UserError
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.multimodal import MultimodalModel

IMAGES = {"qwen2_vl": "vision_config", "qwen2_5_vl": "vision_config", "qwen3_5": "vision_config"}
TOWERS = {family: WHOLES[family][key] for family, key in IMAGES.items()} | {
    "qwen2_audio": WHOLES["qwen2_audio"]["audio_config"]
}
GRIDS = [[1, 4, 8], [1, 8, 4], [2, 4, 4]]
SOUNDS = [14, 9]


def tower_of(family: str) -> dict[str, Any]:
    types = {"qwen2_audio": "qwen2_audio_encoder"}
    return {**TOWERS[family], "model_type": types.get(family, f"{family}_vision")}


def model_of(family: str, **options: Any) -> MultimodalModel:
    encoder = Encoder(tower_of(family), **options)
    return MultimodalModel({"tower": encoder}, LANGUAGE_MODELS["llama"], seed=0)


def items_of(unit: Any) -> list[dict[str, Tensor]]:
    """What the unit is given of each item."""
    draws = torch.Generator().manual_seed(1)
    if unit.geometry.kind == "audio":
        return [
            {
                # Two more, which convolutions at the end of a padded sound see.
                "input_features": torch.randn(frames + 2, unit.geometry.mel_bins, generator=draws),
                "feature_lens": torch.tensor([[frames, frames + 2]]),
            }
            for frames in SOUNDS
        ]
    numbers = unit.numbers_of_patch
    return [
        {
            "pixel_values": torch.randn(int(torch.tensor(grid).prod()), numbers, generator=draws),
            "image_grid_thw": torch.tensor([grid]),
        }
        for grid in GRIDS
    ]


def alone(unit: Any, item: dict[str, Tensor]) -> Tensor:
    """transformers' own tower on one item, padded as it asks."""
    if unit.geometry.kind == "image":
        return unit.model(item["pixel_values"], grid_thw=item["image_grid_thw"]).pooler_output
    frames, given = item["feature_lens"][0].tolist()
    window = 2 * unit.model.config.max_source_positions
    padded = torch.nn.functional.pad(item["input_features"].T, (0, window - given))[None]
    rows = (frames - 1) // 2 + 1
    seen = torch.arange(window // 2) < rows
    mask = torch.where(seen, 0.0, float("-inf"))[None, None, None].expand(1, 1, window // 2, -1)
    with patch.object(unit.model.config, "_attn_implementation_internal", "sdpa"):
        return unit.model(padded, attention_mask=mask).last_hidden_state[0, : rows // 2]


@pytest.mark.parametrize("family", often(TOWERS, "qwen2_5_vl", "qwen2_audio"))
def test_packed_items_are_what_transformers_says_of_each(family: str) -> None:
    unit = model_of(family)["tower"]
    items = items_of(unit)
    packed = {key: torch.cat([item[key] for item in items]) for key in items[0]}
    expected = torch.cat([unit.projector(alone(unit, item)) for item in items])
    # fp32 sums of matrix products over rows in other numbers.
    torch.testing.assert_close(unit(packed), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    trained = [p for p in unit.parameters() if p.requires_grad]
    wanted = torch.autograd.grad((expected * weights).sum(), trained, allow_unused=True)
    found = torch.autograd.grad((unit(packed) * weights).sum(), trained, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    of_items = {key: packed[key] for key in packed if key not in ("pixel_values", "input_features")}
    for cut in range(1, len(unit.layers)):
        hidden = unit.stage(0, cut)(packed)
        assert hidden.shape[1] == unit.boundary(cut, "tower").width
        torch.testing.assert_close(unit.stage(cut, len(unit.layers))(of_items, hidden), unit(packed))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_audio"])
def test_they_are_saved_as_towers_of_transformers_and_read_again(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    again = MultimodalModel.from_pretrained(tmp_path)
    items = items_of(model["tower"])
    for item in items:
        assert torch.equal(again["tower"](item), model["tower"](item))


@pytest.mark.parametrize(
    "options",
    [
        {"merge": "prepend"},
        {"features": "patch"},
        {"tokens_per_row": 4},
        {"after_projector": lambda inputs, hidden: hidden},
    ],
)
def test_what_needs_items_of_one_size_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="unlike sizes"):
        model_of("qwen2_vl", **options)
