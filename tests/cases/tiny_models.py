"""Tiny random models of every family that must work from the start."""

from __future__ import annotations

from typing import Any

import torch

from cases.often import often
from dilatant.models.multimodal import Encoder, MultimodalModel

VOCABULARY = 64
HIDDEN = 32
_LANGUAGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LANGUAGE},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, **_LANGUAGE},
    "mistral": {"model_type": "mistral", "sliding_window": 6, **_LANGUAGE},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
        **_LANGUAGE,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_LANGUAGE},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 6, **_LANGUAGE},
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": _ALTERNATING,
        **_LANGUAGE,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **_LANGUAGE},
}
_VISION = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 8, "patch_size": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "siglip": {
        "model_type": "siglip_vision_model",
        "intermediate_size": 48,
        "vision_use_head": False,
        "num_channels": 1,
        **_VISION,
    },
    "siglip_with_head": {"model_type": "siglip_vision_model", "intermediate_size": 48, **_VISION},
    "clip": {"model_type": "clip_vision_model", "intermediate_size": 48, **_VISION},
    "dinov2": {"model_type": "dinov2", **_VISION},
    "dinov2_registers": {"model_type": "dinov2_with_registers", "num_register_tokens": 3, **_VISION},
    "dinov3": {
        "model_type": "dinov3_vit",
        "num_register_tokens": 2,
        "pos_embed_rescale": None,
        **_VISION,
        "hidden_size": 32,
    },
    "pixtral": {"model_type": "pixtral", "intermediate_size": 48, **_VISION, "hidden_size": 32},
    "whisper": {
        "model_type": "whisper",
        "d_model": 24,
        "encoder_layers": 4,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 10,
        "num_mel_bins": 8,
        "vocab_size": 64,
        "pad_token_id": 0,
    },
}

# Kinds: a tied head; windows, norms behind blocks and soft caps of its family; one matrix for queries, keys and values.
LANGUAGE_FAMILIES = often(LANGUAGE_MODELS, "llama_tied", "gemma3_text", "phi3")
# Kinds: rotary positions, items of any size, sounds.
ENCODER_FAMILIES = often(ENCODERS, "dinov3", "pixtral", "whisper")


def language_only(family: str = "llama", seed: int = 0) -> MultimodalModel:
    return MultimodalModel({}, LANGUAGE_MODELS[family], seed=seed)


def vision_language(
    language: str = "llama", encoder: str = "siglip", seed: int = 0, **settings: Any
) -> MultimodalModel:
    return MultimodalModel({"vision": Encoder(ENCODERS[encoder], **settings)}, LANGUAGE_MODELS[language], seed=seed)


def images(count: int, channels: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


def positions(*lengths: int) -> torch.Tensor:
    """Positions of packed samples: int64 [1, tokens]."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found
