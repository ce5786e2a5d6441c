"""Tiny random configs of whole vision-language models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dilatant.data.pixels import as_array
from dilatant.data.sample import EncodedSample
from dilatant.data.tokenizer import load_tokenizer
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.native_encoder import is_native

IMAGE = 90
"""The id that stands for a row of an image."""
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
    "internvl": {
        "model_type": "internvl",
        "vision_config": {
            "model_type": "internvl_vision",
            **_VISION,
            "image_size": [8, 8],
            "patch_size": [2, 2],
        },
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
_NATIVE = {
    "depth": 5,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SPATIAL = {
    **_TEXT,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
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
}


def whole_config(family: str) -> Any:
    settings = dict(WHOLES[family])
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def reference(family: str, seed: int = 0) -> Any:
    """transformers' own model, with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(whole_config(family), attn_implementation="eager")
    for weight in model.parameters():  # norms and biases begin as constants, which would hide mistakes
        weight.data += 0.05 * torch.randn_like(weight)
    return model.train()


def sample_of(model: MultimodalModel, number: int, parts: Sequence[tuple[Any, ...]]) -> EncodedSample:
    """A sample of parts ("text", tokens) and ("image", rows, columns), in groups of patches where sizes may differ."""
    generator = torch.Generator().manual_seed(number)
    unit = model["vision"]
    ids: list[int] = []
    media: dict[str, list[Any]] = {}
    tokens = 0
    for kind, *about in parts:
        if kind == "text":
            ids += torch.randint(3, 80, (about[0],), generator=generator).tolist()
        elif is_native(unit):
            rows, columns = about
            patches = 4 * rows * columns
            ids += [IMAGE] * (rows * columns)
            tokens += patches
            pixels = torch.randn(patches, 3, 2 * 4, 4, generator=generator).numpy()
            media.setdefault("pixel_values", []).append(pixels)
            media.setdefault("image_grid_thw", []).append(np.array([[1, 2 * rows, 2 * columns]]))
        else:
            ids += [IMAGE] * unit.geometry.tokens_per_row
            tokens += unit.geometry.encoder_tokens
            media.setdefault("pixel_values", []).append(torch.randn(1, 3, 8, 8, generator=generator).numpy())
    input_ids = np.array(ids, np.int64)
    labels = np.where(input_ids == IMAGE, -100, input_ids)
    labels[0] = -100
    inputs = {name: np.concatenate(arrays) for name, arrays in media.items()}
    sizes = {"vision": tokens, "language": len(ids)}
    return EncodedSample(f"sample {number}", input_ids, labels, {"vision": inputs} if inputs else {}, sizes)


def samples_of(model: MultimodalModel) -> list[EncodedSample]:
    """Several images, none, one at the end and one at the beginning of the next."""
    return [
        sample_of(model, 0, [("text", 3), ("image", 2, 3), ("text", 2), ("image", 5, 1), ("text", 6)]),
        sample_of(model, 1, [("text", 9)]),
        sample_of(model, 2, [("text", 5), ("image", 1, 1)]),
        sample_of(model, 3, [("image", 3, 4), ("text", 7)]),
    ]


def transformers_inputs(family: str, sample: EncodedSample, image: int = IMAGE) -> dict[str, torch.Tensor]:
    """What transformers' model is given for a sample."""
    ids = torch.from_numpy(sample.input_ids)[None]
    given = {"input_ids": ids}
    if sample.media:
        given |= {name: torch.as_tensor(as_array(each)) for name, each in sample.media["vision"].items()}
        if family in ("smolvlm", "idefics3"):
            given["pixel_values"] = given["pixel_values"][None]
        if "image_grid_thw" in given:
            given["pixel_values"] = given["pixel_values"].flatten(1)
    if family == "gemma3":
        given["token_type_ids"] = (ids == image).long()
    if family.startswith("qwen"):
        given["mm_token_type_ids"] = (ids == image).long()
    return given


def transformers_loss(theirs: Any, family: str, sample: EncodedSample, image: int = IMAGE) -> torch.Tensor:
    """The sum over targets, of a sample alone."""
    logits = theirs(**transformers_inputs(family, sample, image)).logits[0, :-1].float()
    targets = torch.from_numpy(sample.labels)[1:]
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def save_as_the_hub_does(family: str, folder: Path) -> Any:
    """A folder as the hub has it: weights under their first names, a tokenizer of bytes, an image processor; returns
    the model."""
    settings = {**WHOLES[family], "image_token_id": 299}
    settings["text_config"] = {**settings["text_config"], "vocab_size": 300}
    model_type = settings.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type](**settings))
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
    if family.startswith("qwen"):
        processor |= {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": 8 * 8, "longest_edge": 32 * 32},
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
        }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model
