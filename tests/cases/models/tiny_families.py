"""Tiny random models of the families whose attention must work, in float32 and evaluation mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 48
WINDOW = 6

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, **_EXPERTS},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.3},
    "gpt_oss": {"head_dim": 8, "sliding_window": WINDOW, **_EXPERTS},
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 2,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {"vision_use_head": False, **_VISION},
    "clip_vision_model": _VISION,
    "dinov2": _VISION,
}


def language_model(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **LANGUAGE[family]})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights as large as a trained model's, so that what attention mixes in is seen in the logits.
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif name.endswith("sinks"):
                parameter.normal_()
    return model


def encoder(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    if family == "dinov2" and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("DINOv2 of transformers 5.17 hands its layers no plan: its attention was not checked")
    config = AutoConfig.for_model(family, **ENCODERS[family])
    config._attn_implementation = "eager"
    return AutoModel.from_config(config).eval()
