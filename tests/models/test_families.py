"""Families that are not named anywhere in the code are cut and packed as the known ones are."""

from __future__ import annotations

import pytest
from tiny_models import ENCODERS, LANGUAGE_MODELS, language_only, vision_language

from cut_and_packed import find_problems
from dilatant.models.multimodal import MultimodalModel

PLAIN = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    "gpt_neox": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{
        name: {key: value for key, value in LANGUAGE_MODELS["llama"].items() if key != "model_type"}
        for name in ("olmo2", "granite", "mixtral", "cohere", "starcoder2")
    },
}


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_known_language_models_pass(family: str) -> None:
    assert find_problems(language_only(family).language) == ()


@pytest.mark.parametrize("family", ENCODERS)
def test_known_encoders_pass(family: str) -> None:
    assert find_problems(vision_language(encoder=family)["vision"]) == ()


@pytest.mark.parametrize("family", PLAIN)
def test_plain_families_need_no_code(family: str) -> None:
    mllm = MultimodalModel({}, {"model_type": family, **PLAIN[family]}, seed=0)
    assert find_problems(mllm.language) == ()
