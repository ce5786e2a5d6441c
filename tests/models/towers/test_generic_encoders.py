"""Encoders of families that no code names: what is read from their processors, configs and features."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cases.generic_steps import GenericCase, opened
from dilatant.config.model import LoraConfig
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.models.adapters.lora import read_as_experts, targets
from dilatant.models.core.slicing import capturing_hooks, held_blocks
from dilatant.models.core.structure import on_meta
from dilatant.models.encoders.generic_encoder import GenericTower
from dilatant.models.encoders.narrow_encoder import (
    auto_class,
    default_processor,
    join_items,
    layout_of,
    narrow_encoder,
    rows_by,
    takes_texts_alone,
)
from dilatant.models.families.generic import read_family
from dilatant.models.families.media_proof import drawn, embedded_ids, samples_with_media, small_copy
from dilatant.models.families.pretrained import PretrainedModel, composite_of
from dilatant.models.families.shrink import shrink_widths
from dilatant.models.families.training_proof import loss_in_transformers, loss_of
from dilatant.models.row_attention import attend_by_default


class Features(nn.Module):
    """A model whose method for images returns `output`."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def get_image_features(self, pixel_values: Tensor) -> Any:
        return self.output


PADDED = torch.arange(12.0).reshape(2, 3, 2)
KEPT = torch.tensor([[True, True, False], [True, False, False]])


@pytest.mark.parametrize(
    ("output", "given", "wanted"),
    [
        (SimpleNamespace(pooler_output=None, last_hidden_state=PADDED), {}, PADDED.flatten(0, 1)),
        (SimpleNamespace(pooler_output=PADDED, attention_mask=KEPT), {}, PADDED[KEPT]),
        (SimpleNamespace(pooler_output=PADDED), {"input_features_mask": KEPT}, PADDED[KEPT]),
        (SimpleNamespace(pooler_output=[PADDED[0], PADDED[1]]), {}, PADDED.flatten(0, 1)),
    ],
    ids=["no pooler_output", "a mask of its output", "a mask that the forward applies", "items"],
)
def test_rows_are_those_that_the_forward_merges(output: Any, given: Any, wanted: Tensor) -> None:
    assert torch.equal(rows_by("image", Features(output), {"pixel_values": PADDED, **given}), wanted)


def test_items_are_joined_along_the_axis_of_their_processor() -> None:
    settings = json.dumps({"image_processor_type": "MiniCPMV4_6ImageProcessor"})
    processor = HuggingFaceImageProcessor(settings, names=("pixel_values", "target_sizes"))
    one, other = (np.full((size, 56, 3), 128, np.uint8) for size in (56, 84))
    axes = processor.axes(one)
    assert axes == {"pixel_values": 3}  # its patches lie in one long row
    parts = [torch.as_tensor(processor(each)["pixel_values"]) for each in (one, other)]
    assert torch.equal(join_items(parts, 3), torch.as_tensor(processor(one, other)["pixel_values"]))


def test_items_are_padded_to_one_shape() -> None:
    joined = join_items([torch.ones(1, 2, 3), torch.ones(2, 1, 4)], 0)
    assert joined.shape == (3, 2, 4)
    assert joined.sum() == 6 + 8


def test_outputs_that_the_model_does_not_read_are_dropped() -> None:
    settings = json.dumps({"image_processor_type": "GotOcr2ImageProcessor"})
    image = np.full((40, 40, 3), 128, np.uint8)
    assert {*HuggingFaceImageProcessor(settings)(image)} == {"pixel_values", "num_patches"}
    assert {*HuggingFaceImageProcessor(settings, names=("pixel_values",))(image)} == {"pixel_values"}


def test_processors_make_images_of_the_sizes_in_the_config() -> None:
    config = CONFIG_MAPPING["deepseek_vl_hybrid"](
        high_res_vision_config={"model_type": "sam_vision_model", "image_size": 256}
    )
    outputs = default_processor(config)(np.full((40, 60, 3), 128, np.uint8))
    assert outputs["high_res_pixel_values"].shape[-2:] == (256, 256)
    tiles = [[56, 112], [112, 56], [112, 112]]
    config = CONFIG_MAPPING["llava_next"](
        vision_config={"model_type": "clip_vision_model", "image_size": 56}, image_grid_pinpoints=tiles
    )
    outputs = default_processor(config)(np.full((200, 200, 3), 128, np.uint8))
    assert outputs["pixel_values"].shape == (1, 5, 3, 56, 56)  # the whole image and its four tiles


def test_an_encoder_of_one_layer_computes_the_same_rows() -> None:
    config = CONFIG_MAPPING["deepseek_vl"]()
    config.vision_config.image_size, config.vision_config.num_hidden_layers = 64, 2
    tower = read_family(config, "model").towers["vision"]
    assert isinstance(tower, GenericTower)
    whole = replace(tower, inner=None, uncut="a test")
    layout = layout_of(tower.typical(config))
    rows = [each.shapes.rows(narrow_encoder(each.shapes)[0], layout) for each in (tower, whole)]
    assert torch.equal(*rows)
    assert whole.shapes.tokens(layout) == (len(rows[0]), len(rows[0]))
    assert narrow_encoder(whole.shapes)[1] is None


@pytest.mark.parametrize("indexes", [[], [0], [0, 1]])
def test_rows_for_inner_blocks_are_found_from_the_encoders_output(indexes: list[int]) -> None:
    encoder = {"hidden_size": 24, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 4}
    vision = {**encoder, "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": indexes}
    text = {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
    tokens = {"image_token_id": 127, "video_token_id": 126}
    config = CONFIG_MAPPING["cosmos3_omni"](text_config=text, vision_config=vision, **tokens)
    assert read_family(config, "model").towers["vision"].inner_rows(config) == len(indexes)


def test_one_unit_computes_what_the_familys_own_forward_does() -> None:
    config = CONFIG_MAPPING["deepseek_vl"]()
    config.vision_config.image_size, config.vision_config.num_hidden_layers = 64, 2
    whole = small_copy(PretrainedModel.of(config, "model").as_one_unit("a test"))
    model = drawn(whole, attend_by_default)
    assert [*model.units] == ["language"]
    assert model.language.reads(0, 1) == {"tokens", "vision"}
    samples = samples_with_media(whole)
    wanted = loss_in_transformers(composite_of(model.weights_of_whole(), whole).eval(), whole, samples)
    loss = loss_of(model.units, samples, [(number,) for number in range(len(samples))], is_cut=False)
    assert torch.allclose(loss, wanted, rtol=1e-6)
    text = torch.arange(5)[None]
    assert model(text).logits.shape[:2] == (1, 5)


def test_a_narrow_config_narrows_encoders_inside_encoders() -> None:
    config = CONFIG_MAPPING["deepseek_ocr2"](text_config={"mlp_layer_types": ["dense"] * 32})
    vision = shrink_widths(config, spatial=False)["vision_config"]
    assert vision["sam_config"]["hidden_size"] == vision["encoder_config"]["hidden_size"] == 64


def test_an_encoder_of_timm_keeps_its_widths() -> None:
    settings = shrink_widths(CONFIG_MAPPING["fast_vlm"](), spatial=False)  # the architecture decides them
    assert settings["vision_config"]["hidden_size"] == 3072
    assert settings["text_config"]["hidden_size"] == 64


def test_every_kind_of_layer_gets_sections_of_positions() -> None:
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = CONFIG_MAPPING["cohere_compass"](text_config={"rope_parameters": rope})
    text = shrink_widths(config, spatial=True)["text_config"]
    assert sum(text["rope_parameters"]["full_attention"]["mrope_section"]) * 2 == text["head_dim"]


def test_a_width_beside_the_parts_is_narrowed_with_theirs() -> None:
    config = CONFIG_MAPPING["ovis2"](hidden_size=4096)
    settings = shrink_widths(config, spatial=False)
    assert settings["hidden_size"] == settings["text_config"]["hidden_size"] == 64


def test_ids_with_embeddings_of_their_own_are_in_the_proof() -> None:
    settings = CONFIG_MAPPING["ovis2"]().to_dict()
    assert embedded_ids(settings) == sorted(settings["visual_indicator_token_ids"])
    assert not embedded_ids(CONFIG_MAPPING["glm4v"]().to_dict())


def test_a_forward_that_needs_images_is_proven_without_texts_alone() -> None:
    assert not takes_texts_alone(CONFIG_MAPPING["blip-2"]())
    assert takes_texts_alone(CONFIG_MAPPING["glm4v"]())


def test_adapters_leave_layers_that_peft_reads_as_experts() -> None:
    pytest.importorskip("peft")
    config = CONFIG_MAPPING["glm4v_moe"](
        text_config={"num_hidden_layers": 2, "n_routed_experts": 4, "hidden_size": 64, "num_attention_heads": 4}
    )
    with on_meta():
        model = auto_class(config).from_config(config)
    taken = read_as_experts(model)
    assert {name.rpartition(".")[2] for name in taken} == {"gate_proj", "up_proj", "down_proj"}
    found = targets(model, LoraConfig(units=("language",)), {"language": ("model.language_model",)})
    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_only_whole_blocks_record_their_hidden_states() -> None:
    """transformers' hooks within them, for attention weights, end a compiled graph."""
    unit = opened(GenericCase("deepseek_vl", (0,)), "meta").units["vision"]
    assert unit.structure is not None
    blocks = held_blocks(unit.model.get_submodule(unit.structure.blocks))
    assert [len(capturing_hooks(block)) for block in blocks] == [1] * 3
    assert not any(capturing_hooks(one) for block in blocks for one in block.modules() if one is not block)


def test_a_table_that_is_read_before_the_blocks_is_before_them() -> None:
    """Voxtral reads the weights of its positions, which are frozen, and does not call their module."""
    unit = opened(GenericCase("voxtral", (0,)), "meta").units["audio"]
    layers = {weight.layer for weight in unit.weights if "embed_positions" in weight.key}
    assert layers == {"audio.embedding"}
