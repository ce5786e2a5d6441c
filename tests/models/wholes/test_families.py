"""Families that the code does not name are cut and packed like the known ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cases.models.cut_and_packed import find_problems
from cases.often import often
from cases.tiny_models import ENCODER_FAMILIES, ENCODERS, LANGUAGE_MODELS, language_only, vision_language
from dilatant.config.errors import UserError
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.multimodal import MultimodalModel

_LLAMA = {key: value for key, value in LANGUAGE_MODELS["llama"].items() if key != "model_type"}
TABLE_B1: Mapping[str, Mapping[str, Any]] = {
    "Llama 3": LANGUAGE_MODELS["llama"],
    "Llama 4": {
        **LANGUAGE_MODELS["llama"],
        "model_type": "llama4_text",
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Mistral": LANGUAGE_MODELS["mistral"],
    "Mixtral": {**LANGUAGE_MODELS["llama"], "model_type": "mixtral", "num_local_experts": 4},
    "Gemma": {**LANGUAGE_MODELS["llama"], "model_type": "gemma", "head_dim": 8},
    "Gemma 2": LANGUAGE_MODELS["gemma2"],
    "Qwen 2, 2.5": LANGUAGE_MODELS["qwen2"],
    "Qwen 3": LANGUAGE_MODELS["qwen3"],
    "Qwen 3 with experts": {
        **LANGUAGE_MODELS["llama"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Phi 1, 2": {**LANGUAGE_MODELS["llama"], "model_type": "phi"},
    "Phi 3, 4": LANGUAGE_MODELS["phi3"],
    "Phi 3.5 with experts": {
        **LANGUAGE_MODELS["llama"],
        "model_type": "phimoe",
        "num_local_experts": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "InternLM 3": {**LANGUAGE_MODELS["llama"], "model_type": "internlm3"},
    "CLIP": ENCODERS["clip"],
    "DINOv2": ENCODERS["dinov2"],
    "DINOv3": ENCODERS["dinov3"],
    "SigLIP, SigLIP 2 of fixed size": ENCODERS["siglip"],
    "Pixtral": ENCODERS["pixtral"],
    "InternViT": {**ENCODERS["clip"], "model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [2, 2]},
    "Whisper": ENCODERS["whisper"],
}
"""What table B.1 of Cornstarch asks for, newer families too. Qwen's towers are in `test_merging_parts`."""
REFUSED = {
    "siglip2_vision_model": "does not look like an encoder of fixed-size images",  # of native resolution
    "qwen2_5_omni_audio_encoder": "is not an encoder that transformers can build alone",
    "eva_clip": "transformers has no model_type 'eva_clip'",
    "internlm2": "transformers has no model_type 'internlm2'",  # its weights map onto Llama's layout
    "phi4_multimodal_audio": "phi4_multimodal_audio",
}
"""Families of that table that are no parts here → the reason."""
PLAIN = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    "gpt_neox": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **dict.fromkeys(("olmo", "nanochat", "olmo2", "mixtral", "cohere", "starcoder2"), _LLAMA),
    "granite": {**_LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "hyperclovax": {**_LLAMA, "embedding_multiplier": 10.0, "attention_multiplier": 0.3},
}
"""The second row holds families that scale or norm hidden states before their first block or behind the last."""


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_known_language_models_pass(family: str) -> None:
    assert find_problems(language_only(family).language) == ()


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_known_encoders_pass(family: str) -> None:
    assert find_problems(vision_language(encoder=family)["vision"]) == ()


@pytest.mark.parametrize("name", often(TABLE_B1, "Gemma", "InternViT"))
def test_parts_of_table_b1_are_cut_and_packed(name: str) -> None:
    part = TABLE_B1[name]
    if part["model_type"] not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers does not have {name}")
    is_text = "vocab_size" in part and part["model_type"] != "whisper"
    encoders = {} if is_text else {"tower": Encoder(part)}
    model = MultimodalModel(encoders, part if is_text else LANGUAGE_MODELS["llama"], seed=0)
    assert find_problems(model["language" if is_text else "tower"]) == ()


@pytest.mark.parametrize("family", REFUSED)
def test_other_parts_of_table_b1_are_refused_in_one_line(family: str) -> None:
    part = {"model_type": family}
    tower, text = (None, part) if family == "internlm2" else (part, LANGUAGE_MODELS["llama"])
    with pytest.raises(UserError, match=REFUSED[family]) as raised:
        MultimodalModel({} if tower is None else {"tower": Encoder(tower)}, text, device="meta")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eva02_tiny_patch14_224", "vit_tiny_patch16_224"])
def test_a_tower_of_timm_is_an_encoder_of_its_blocks(kind: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is absent; not checked: that EVA-CLIP is cut between its blocks")
    torch.manual_seed(0)
    tower = timm.create_model(kind, img_size=32, patch_size=16, num_classes=0, global_pool="", depth=3)
    stated: dict[str, Any] = {"kind": "image", "input_name": "x", "row_shape": (3, 32, 32), "tokens_per_row": 5}
    model = MultimodalModel({"tower": Encoder(tower, width=tower.embed_dim, **stated)}, LANGUAGE_MODELS["llama"])
    unit, picture = model["tower"].eval(), torch.randn(2, 3, 32, 32)
    assert len(unit.layers) == 3 + 3  # the embedding, blocks, the norm and the projector
    hidden = unit.stage(0, 2)({"x": picture})
    rows = unit.stage(2, len(unit.layers))(None, hidden)
    torch.testing.assert_close(rows, unit({"x": picture}), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows, unit.projector(tower(picture)), rtol=1e-5, atol=1e-5)


def test_a_vision_tower_of_open_clip_trains_in_stages() -> None:
    what = "open_clip or torchvision is absent; not checked: that its towers are cut, train, and load what has trained"
    open_clip = pytest.importorskip("open_clip", reason=what, exc_type=ImportError)
    stated: dict[str, Any] = {"kind": "image", "input_name": "x", "row_shape": (3, 28, 28), "width": 32}

    def tower(**settings: Any) -> Any:
        vision = {"image_size": 28, "patch_size": 14, "width": 32, "layers": 3, "head_width": 8, **settings}
        text = {"context_length": 4, "vocab_size": 8, "width": 8, "heads": 1, "layers": 1}
        return open_clip.CLIP(16, vision, text).visual

    torch.manual_seed(0)
    plain, again = (tower(pool_type="none") for _ in range(2))
    plain.proj = again.proj = None  # tokens before the projection to the space of texts
    model = MultimodalModel({"tower": Encoder(plain, tokens_per_row=5, **stated)}, LANGUAGE_MODELS["llama"], seed=0)
    again.load_state_dict(plain.state_dict())
    unit, picture = model["tower"], torch.randn(2, 3, 28, 28)
    assert len(unit.layers) == 3 + 3  # the embedding, blocks, the norm and the projector
    optimizer = torch.optim.SGD([*unit.model.parameters()], lr=0.1)
    projector = copy.deepcopy(unit.projector)
    hidden = unit.stage(0, 2)({"x": picture})
    unit.stage(2, len(unit.layers))(None, hidden).square().sum().backward()
    projector(again(picture)).square().sum().backward()
    theirs = dict(again.named_parameters())
    for name, weight in unit.model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name].grad, rtol=1e-5, atol=1e-5)
    optimizer.step()
    again.load_state_dict(unit.model.state_dict())
    rows = unit({"x": picture})
    torch.testing.assert_close(unit.projector(again(picture)), rows, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"'tower': its forward gives \[1, 1, 16\] for one row, not \[1, 5, 32\]"):
        MultimodalModel({"tower": Encoder(tower(), tokens_per_row=5, **stated)}, LANGUAGE_MODELS["llama"])


@torch.no_grad()
@pytest.mark.parametrize("family", ["pixtral", "dinov3"])
def test_adapted_encoder_equals_transformers_image_by_image(family: str) -> None:
    unit = vision_language(encoder=family)["vision"].eval()
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = unit.stage(0, len(unit.layers) - 1)({"pixel_values": images})
    theirs = torch.cat([unit.model(pixel_values=image[None]).last_hidden_state for image in images])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", often(PLAIN, "gpt2", "gpt_neox", "cohere", "granite"))
def test_plain_families_need_no_code(family: str) -> None:
    mllm = MultimodalModel({}, {"model_type": family, **PLAIN[family]}, seed=0)
    assert find_problems(mllm.language) == ()
