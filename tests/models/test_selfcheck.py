"""A family that cannot be cut or packed is found out by the model itself."""

from __future__ import annotations

import pytest
from tiny_models import ENCODERS, LANGUAGE_MODELS, language_only, vision_language

from dilatant.models.adapters import Adapter
from dilatant.models.multimodal import Encoder, MultimodalModel
from dilatant.models.selfcheck import find_problems

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


def test_a_family_that_cannot_be_packed_is_found() -> None:
    """Bloom's attention bias counts tokens of the row, not of the sample."""
    settings = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}
    (problem,) = find_problems(MultimodalModel({}, settings, seed=0).language)
    assert problem.startswith("when it is packed with other samples, its outputs change")


def test_a_family_that_cannot_be_cut_is_found() -> None:
    settings = {**ENCODERS["dinov2"], "model_type": "dinov3_vit"}
    unit = MultimodalModel({"vision": Encoder(settings)}, LANGUAGE_MODELS["llama"], seed=0)["vision"]
    (problem,) = find_problems(unit)
    assert problem.startswith("it cannot be cut into stages: ValueError")


def test_a_wrong_adapter_is_found() -> None:
    adapter = Adapter(lambda model, hidden: model.post_layernorm(hidden))  # forgets the blocks
    mllm = MultimodalModel(
        {"vision": Encoder(ENCODERS["siglip"], adapter=adapter)}, LANGUAGE_MODELS["llama"], seed=0
    )
    (problem,) = find_problems(mllm["vision"])
    assert problem.startswith("when it is cut into stages, its outputs change")
