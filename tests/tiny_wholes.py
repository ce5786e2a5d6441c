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

from dilatant.data.sample import EncodedSample
from dilatant.data.tokenizer import load_tokenizer
from dilatant.models.multimodal import MultimodalModel

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


def sample_of(
    model: MultimodalModel, family: str, number: int, parts: Sequence[tuple[Any, ...]]
) -> EncodedSample:
    """A sample of parts ("text", tokens) and ("image",)."""
    generator = torch.Generator().manual_seed(number)
    unit = model["vision"]
    ids: list[int] = []
    images = []
    for kind, *about in parts:
        if kind == "text":
            ids += torch.randint(3, 80, (about[0],), generator=generator).tolist()
        else:
            ids += [IMAGE] * unit.geometry.tokens_per_row
            images.append(torch.randn(3, 8, 8, generator=generator))
    input_ids = np.array(ids, np.int64)
    labels = np.where(input_ids == IMAGE, -100, input_ids)
    labels[0] = -100
    sizes = {"vision": len(images) * unit.geometry.encoder_tokens, "language": len(ids)}
    media = {"vision": {"pixel_values": torch.stack(images).numpy()}} if images else {}
    return EncodedSample(f"sample {number}", input_ids, labels, media, sizes)


def samples_of(model: MultimodalModel, family: str) -> list[EncodedSample]:
    """Several images, none, one at the end and one at the beginning of the next."""
    return [
        sample_of(model, family, 0, [("text", 3), ("image",), ("text", 2), ("image",), ("text", 6)]),
        sample_of(model, family, 1, [("text", 9)]),
        sample_of(model, family, 2, [("text", 5), ("image",)]),
        sample_of(model, family, 3, [("image",), ("text", 7)]),
    ]


def transformers_inputs(family: str, sample: EncodedSample) -> dict[str, torch.Tensor]:
    """What transformers' model is given for a sample."""
    ids = torch.from_numpy(sample.input_ids)[None]
    given = {"input_ids": ids}
    if sample.media:
        pixels = torch.as_tensor(sample.media["vision"]["pixel_values"])
        given["pixel_values"] = pixels[None] if family in ("smolvlm", "idefics3") else pixels
    if family == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    return given


def transformers_loss(theirs: Any, ours: MultimodalModel, family: str, sample: EncodedSample) -> torch.Tensor:
    """The sum over targets, of a sample alone."""
    logits = theirs(**transformers_inputs(family, sample)).logits[0, :-1].float()
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
    size = {"height": 8, "width": 8}
    processor = {"image_processor_type": "SiglipImageProcessor", "size": size, "do_convert_rgb": True}
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **statistics}))
    return model
