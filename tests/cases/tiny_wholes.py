"""Tiny random configs of whole vision-language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.models.encoders.narrow_encoder import auto_class

IMAGE = 90
"""The id that stands for a row of an image."""
SOUND = 94
"""The same of a sound."""
_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 2,
}
WHOLES: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 8, **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_id": IMAGE,
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION},
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_token_id": IMAGE,
        "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16], [8, 24], [24, 8]],
        "vision_aspect_ratio": "anyres_max_2",
        "video_token_id": 91,
    },
    "internvl": {
        "model_type": "internvl",
        "vision_config": {"model_type": "internvl_vision", **_VISION, "image_size": [8, 8], "patch_size": [2, 2]},
        "text_config": {"model_type": "qwen2", **_TEXT},
        "image_token_id": IMAGE,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "vision_config": {"model_type": "smolvlm_vision", **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "idefics3": {
        "model_type": "idefics3",
        "vision_config": {"model_type": "idefics3_vision", **_VISION},
        "text_config": {"model_type": "llama", **_TEXT},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "gemma3": {
        "model_type": "gemma3",
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_VISION},
        "text_config": {
            "model_type": "gemma3_text",
            **_TEXT,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
        "image_token_id": IMAGE,
        "boi_token_id": 91,
        "eoi_token_id": 92,
        "mm_tokens_per_image": 16,  # more than the window
    },
}
_NATIVE = {"depth": 5, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_AUDIO = {
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "max_source_positions": 30,
}
_SPATIAL = {
    **_TEXT,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_QWEN = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
WHOLES |= {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "vision_config": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, **_NATIVE},
        "text_config": {"model_type": "qwen2_vl_text", **_SPATIAL},
        **_QWEN,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1, 3],
            "window_size": 16,
            **_NATIVE,
        },
        "text_config": {"model_type": "qwen2_5_vl_text", **_SPATIAL},
        **_QWEN,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1, 2, 4],
            **_NATIVE,
        },
        "text_config": {"model_type": "qwen3_vl_text", **_SPATIAL},
        **_QWEN,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            **_NATIVE,
        },
        "text_config": {
            "model_type": "qwen3_5_text",
            **_TEXT,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": [
                *("linear_attention", "linear_attention", "full_attention"),
                *("linear_attention", "full_attention"),
            ],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 0],
                "partial_rotary_factor": 0.25,
            },
        },
        **_QWEN,
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [1, 2],
            **_NATIVE,
        },
        "text_config": {"model_type": "qwen3_vl_moe_text", **_SPATIAL, **_EXPERTS},
        **_QWEN,
    },
    "qwen2_5_omni_thinker": {
        "model_type": "qwen2_5_omni_thinker",
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1, 3],
            "window_size": 16,
            **_NATIVE,
        },
        "audio_config": {**_AUDIO, "n_window": 4, "output_dim": 32},
        "text_config": {"model_type": "qwen2_5_omni_text", **_SPATIAL},
        "image_token_index": IMAGE,
        "video_token_index": 91,
        "audio_token_index": SOUND,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        "audio_start_token_id": 95,
        "audio_end_token_id": 96,
    },
    "qwen2_audio": {
        "model_type": "qwen2_audio",
        "audio_config": {"model_type": "qwen2_audio_encoder", **_AUDIO},
        "text_config": {"model_type": "qwen2", **_TEXT},
        "audio_token_index": SOUND,
    },
    "paligemma": {
        "model_type": "paligemma",
        "vision_config": {
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
            "projection_dim": 32,
            **_VISION,
        },
        "text_config": {
            "model_type": "gemma2",
            **_TEXT,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "full_attention"),
            ],
        },
        "image_token_id": IMAGE,
        "projection_dim": 32,
    },
}

WHOLES["qwen3_5_moe"] = {
    **WHOLES["qwen3_5"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **WHOLES["qwen3_5"]["text_config"],
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 16,
    },
}

WHOLES["gemma4"] = {
    "model_type": "gemma4",
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "standardize": True,
        "use_clipped_linears": True,
    },
    "text_config": {
        "model_type": "gemma4_text",
        **_TEXT,
        "num_hidden_layers": 7,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": 99,
        "num_kv_shared_layers": 3,
        "use_bidirectional_attention": "vision",
        "sliding_window": 6,
        "layer_types": [
            *("sliding_attention", "full_attention", "sliding_attention", "sliding_attention"),
            *("full_attention", "sliding_attention", "full_attention"),
        ],
    },
    "audio_config": {
        "model_type": "gemma4_audio",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_chunk_size": 3,
        "attention_context_left": 4,
        "output_proj_dims": 24,
        "subsampling_conv_channels": [128, 4],  # the first: mel bins
    },
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "audio_token_id": SOUND,
    "boi_token_id": 92,
    "eoi_token_id": 93,
}

WHOLES["mllama"] = {
    "model_type": "mllama",
    "vision_config": {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 8,
        "patch_size": 2,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 3 * 24,
    },
    "text_config": {"model_type": "mllama_text_model", **_TEXT, "cross_attention_layers": [1, 3]},
    "image_token_index": IMAGE,
}


def whole_config(family: str) -> Any:
    if "omni" in family and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("its thinker has other paths there")
    settings = dict(WHOLES[family])
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def reference(family: str, seed: int = 0) -> Any:
    """transformers' own model, with random weights."""
    torch.manual_seed(seed)
    config = whole_config(family)
    model = auto_class(config).from_config(config, attn_implementation="eager")
    for weight in model.parameters():  # norms and biases begin as constants, which would hide mistakes
        weight.data += 0.05 * torch.randn_like(weight)
    if family == "gemma4":  # whose softmaxes have no scale: sharp ones make much of rounding
        for name, weight in model.named_parameters():
            # Nor has the projection of 128 numbers, as many as four channels make of the mel bins.
            weight.data *= 0.05 if "q_norm" in name else 0.25 if "input_proj_linear" in name else 1.0
        tower = model.model.audio_tower
        tower.config._attn_implementation = "sdpa" if tower._supports_sdpa else "eager"  # 5.17's eager mask is wrong
    return model.train()


def save_as_the_hub_does(family: str, folder: Path) -> Any:
    """A folder as the hub has it: weights under their first names, a tokenizer of bytes, an image processor; returns
    the model."""
    settings = {**WHOLES[family]}
    for key, own in (("image", 299), ("audio", 298)):
        settings |= {name: own for name in settings if name in (f"{key}_token_id", f"{key}_token_index")}
    settings["text_config"] = {**settings["text_config"], "vocab_size": 300}
    if family == "gemma4":
        settings["text_config"]["vocab_size_per_layer_input"] = 300
    model_type = settings.pop("model_type")
    config = CONFIG_MAPPING[model_type](**settings)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    for weight in model.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(str(folder))
    processor: dict[str, Any] = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 8, "width": 8},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    if "audio_config" in settings:
        processor |= {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8, "n_fft": 64}
    if family == "llava_onevision":
        pinpoints = WHOLES[family]["image_grid_pinpoints"]
        processor |= {"image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": pinpoints}
    if family.startswith("qwen") and family != "qwen2_audio":
        processor |= {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
    if family == "mllama":
        processor |= {"image_processor_type": "MllamaImageProcessor", "max_image_tiles": 4}
    if family == "gemma4":
        processor = {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model
