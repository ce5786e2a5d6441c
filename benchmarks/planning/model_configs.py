"""Configs of real models, and the devices on which benchmarks plan them: facts alone, which any version of the planner
can read."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL: dict[str, Any] = {
    "encoders": {
        "vision": {
            "kind": "image",
            "config": {
                "model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14, "hidden_size": 1152,
                "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "vision_use_head": False,
            },
            "projector": "mlp",
        }
    },
    "language_model": {
        "tokenizer": "bytes",
        "config": {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
    },
    "generators": {
        "image": {
            "config": {
                "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
                "block_out_channels": [320, 640, 1280, 1280], "attention_head_dim": [5, 10, 20, 20],
                "cross_attention_dim": 1024, "use_linear_projection": True,
            },
            "vae": {
                "_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 3, "latent_channels": 4,
                "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
                "up_block_types": ["UpDecoderBlock2D"] * 4, "sample_size": 512, "scaling_factor": 0.18215,
            },
            "tokens_per_item": 64,
            "connector": "mlp",
        }
    },
}  # fmt: skip
"""A vision tower of 0.4 billion parameters, a language model of 8 and a generator of 0.9."""

QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip
QWEN_72B = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 152064,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip


def qwen_vl(text: dict[str, Any], inner: int) -> dict[str, Any]:
    """Return the config of Qwen2.5-VL around a text model; inner: width of the tower's feed-forward."""
    vision = {
        "hidden_size": 1280, "intermediate_size": inner, "depth": 32, "num_heads": 16, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": text["hidden_size"], "patch_size": 14,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    own = {"model_type": "qwen2_5_vl_text", "rope_parameters": rope, **text}
    return {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": own, **QWEN_TOKENS}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, from a config.json or (`model`) of parts, on `devices` H100."""

    devices: int
    batch: int
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write a training config of this case; return its path."""
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
        content = {
            "output_dir": str(folder / "run"),
            "model": self.model or {"id": str(folder)},
            "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": 16384},
            "train": {"steps": 1, "global_batch_size": self.batch, "precision": "bf16"},
            "cluster": {"nodes": self.devices // 8, "gpus_per_node": 8, "hardware": "H100"},
        }
        path = folder / "run.yaml"
        path.write_text(json.dumps(content), encoding="utf-8")
        return path


CASES = {
    "Qwen2.5-VL-7B": Case(64, 512, qwen_vl(QWEN_7B, 3420)),
    "Qwen2.5-VL-72B": Case(1024, 2048, qwen_vl(QWEN_72B, 3456)),
    "Qwen2.5-VL-72B on 1,296": Case(1296, 2048, qwen_vl(QWEN_72B, 3456)),
    "InternVL3-8B": Case(
        64, 512,
        {
            "model_type": "internvl", "image_token_id": 151667,
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096,
                "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14],
            },
            "text_config": {"model_type": "qwen2", **QWEN_7B},
        },
    ),
    "LLaVA-OneVision-7B": Case(
        64, 512,
        {
            "model_type": "llava_onevision", "image_token_id": 151646, "video_token_id": 151647,
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                "num_hidden_layers": 26, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
                "vision_use_head": False,
            },
            "text_config": {"model_type": "qwen2", **QWEN_7B},
        },
    ),
    "Qwen3-VL-30B-A3B": Case(
        64, 512,
        {
            "model_type": "qwen3_vl_moe", **QWEN_TOKENS,
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "out_hidden_size": 2048,
                "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "patch_size": 16,
            },
            "text_config": {
                "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
                "vocab_size": 151936,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
            },
        },
    ),
    "Qwen3-235B-A22B": Case(
        256, 1024,
        model={"language_model": {"config": {
            "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
            "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        }}},
    ),
    "DeepSeek-V3": Case(
        1024, 4096,
        model={"language_model": {"config": {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "vocab_size": 129280,
        }}},
    ),
    "vision, audio, Llama-3-8B and SD 2.1": Case(
        64, 512,
        model={
            **MODEL,
            "encoders": {
                **MODEL["encoders"],
                "audio": {
                    "kind": "audio", "projector": "mlp",
                    "config": {
                        "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
                        "encoder_ffn_dim": 5120, "num_mel_bins": 128, "decoder_attention_heads": 20,
                    },
                },
            },
        },
    ),
}  # fmt: skip
