"""What text models hand to their blocks besides hidden states is found by recording a forward, without declarations."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from cases.tiny_models import LANGUAGE_MODELS
from cases.tiny_wholes import whole_config
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.training_proof import prove
from dilatant.models.language.side_states import BlockInputs
from dilatant.models.multimodal import MultimodalModel

GEMMA_3N = {
    **LANGUAGE_MODELS["llama"],
    "model_type": "gemma3n_text",
    "num_hidden_layers": 4,
    "head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "sliding_window": 4,
    "laurel_rank": 8,
}


def text_of(model: MultimodalModel) -> Any:
    return model.language.model.get_submodule(model.language.text.decoder)


def test_inputs_and_states_of_blocks_are_recorded() -> None:
    whole = PretrainedModel.of(whole_config("gemma4"), "model")
    (found,) = BlockInputs.recorded(text_of(MultimodalModel({}, whole, device="meta")), "layers")
    config = whole.config.text_config
    assert found.widths == (config.hidden_size_per_layer_input,) * config.num_hidden_layers
    heads = [config.per_layer_config[block] for block in (3, 1)]
    kinds = ("sliding_attention", "full_attention")
    sliding, full = ((kind, own.num_key_value_heads, own.head_dim) for kind, own in zip(kinds, heads, strict=True))
    # The last blocks of each kind before the shared ones, 3 and 1, leave their keys and values.
    assert [set(entries) for entries in found.shared] == [set()] * 2 + [{full}] * 2 + [{full, sliding}] * 3 + [set()]


def test_blocks_that_take_hidden_states_alone_have_none() -> None:
    model = MultimodalModel({}, LANGUAGE_MODELS["llama"], device="meta")
    assert BlockInputs.recorded(text_of(model), "layers") == []
    assert not any(isinstance(each, BlockInputs) for each in model.language.extensions)


@pytest.mark.skipif("gemma3n_text" not in CONFIG_MAPPING_NAMES, reason="this version of transformers has no Gemma 3n")
def test_a_family_with_streams_and_inputs_of_blocks_trains_uncut() -> None:
    model = MultimodalModel({}, GEMMA_3N, seed=0)
    proof = prove(model.language, None, "its own mask")
    assert (proof.unproven, proof.alone) == (None, None)
    assert proof.cut is not None
