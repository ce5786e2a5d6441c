"""Families that the code does not name are cut and packed like the known ones."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cases.models.cut_and_packed import find_problems
from cases.often import often
from cases.tiny_models import ENCODER_FAMILIES, LANGUAGE_MODELS, language_only, vision_language
from dilatant.config.errors import UserError
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.multimodal import MultimodalModel

_LLAMA = {key: value for key, value in LANGUAGE_MODELS["llama"].items() if key != "model_type"}
PARTS = {
    "gemma": {"head_dim": 8},
    "internlm3": {},
    "phi": {},
    "phimoe": {"num_local_experts": 4, "bos_token_id": 1, "eos_token_id": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""What table B.1 of Cornstarch asks for beside what is tested elsewhere: Llama 3 is Llama, Qwen 2.5 is Qwen 2, Phi 4 is
Phi 3, and weights of InternLM 2 map onto Llama's layout."""
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


@pytest.mark.slow
@pytest.mark.parametrize("family", PARTS)
def test_language_models_that_cornstarch_lists_pass(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers does not have {family}")
    mllm = MultimodalModel({}, {"model_type": family, **_LLAMA, **PARTS[family]}, seed=0)
    assert find_problems(mllm.language) == ()


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("siglip2_vision_model", "does not look like an encoder of fixed-size images"),
        ("qwen2_5_omni_audio_encoder", "is not an encoder that transformers can build alone"),
        ("eva_clip", "transformers has no model_type 'eva_clip'"),
    ],
)
def test_unsupported_cornstarch_encoders_are_refused_in_one_line(family: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as raised:
        MultimodalModel({"tower": Encoder({"model_type": family})}, LANGUAGE_MODELS["llama"], device="meta")
    assert "\n" not in str(raised.value)


def test_internlm_2_is_not_had_by_transformers_which_is_said() -> None:
    with pytest.raises(UserError, match="transformers has no model_type 'internlm2'"):
        MultimodalModel({}, {"model_type": "internlm2"}, device="meta")


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
