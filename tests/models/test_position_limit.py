"""A model is refused samples for which it has no position: the model itself fails at one token more."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dilatant.config.errors import UserError
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.position_limit import check_positions

MOST = 12
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]]},
    "llama": {"intermediate_size": 16},
}


def opened(family: str) -> LanguageUnit:
    config = AutoConfig.for_model(family, **(SIZES | OWN[family]), max_position_embeddings=MOST)
    return LanguageUnit("language", AutoModelForCausalLM.from_config(config), {})


def runs(unit: LanguageUnit, tokens: int) -> bool:
    try:
        unit.model(input_ids=torch.ones(1, tokens, dtype=torch.long), position_ids=torch.arange(tokens)[None])
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("family", OWN)
def test_samples_without_a_position_are_refused(family: str) -> None:
    unit = opened(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_positions(unit, MOST)
    assert runs(unit, MOST)
    if family == "llama":
        with pytest.warns(UserWarning, match=r"up to 13 tokens.*is for up to 12.*data.max_length to 12"):
            check_positions(unit, MOST + 1)
        assert runs(unit, MOST + 1)
        return
    with pytest.raises(UserError, match=r"up to 13 tokens.*has 12 positions; set data.max_length to 12"):
        check_positions(unit, MOST + 1)
    assert not runs(unit, MOST + 1)
