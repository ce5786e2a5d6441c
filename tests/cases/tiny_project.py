"""Data and a config that train in a second: which side of a small image is bright?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

Dilatant = Callable[..., tuple[int, str, str]]
"""The command line as a function: its arguments → exit code, standard output, standard error."""

SIDES = ("left", "right")


def write_images(folder: Path, count: int, name: str = "train.jsonl") -> Path:
    """Write `count` 8×8 images, bright on the left or on the right, with the side as answer."""
    generator = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        pixels = generator.integers(0, 80, (8, 8), dtype=np.uint8)
        side = number % 2
        pixels[:, 4 * side : 4 * side + 4] += 150
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        question = [{"type": "image", "image": f"images/{number}.png"}, {"type": "text", "text": "Side?"}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": SIDES[side]}]
        lines.append(json.dumps({"id": f"sample-{number}", "messages": messages}))
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def tiny_config(**train: Any) -> dict[str, Any]:
    """Return the config of a run with a vision-language model of a few thousand weights."""
    width = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "num_channels": 1}
    language = {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": True}
    return {
        "output_dir": "run",
        "model": {
            "encoders": {
                "vision": {
                    "kind": "image",
                    "projector": "linear",
                    "config": {**vision, **width, "vision_use_head": False},
                }
            },
            "language_model": {"tokenizer": "bytes", "config": {**language, **width}},
        },
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 64, "workers": 0},
        "train": {"steps": 6, "global_batch_size": 4, "optimizer": {"learning_rate": 0.005}, "report_to": [], **train},
    }


def write_project(folder: Path) -> Path:
    """Fill a folder with data and `config.yaml`."""
    write_images(folder, 12)
    (folder / "config.yaml").write_text(yaml.safe_dump(tiny_config()), encoding="utf-8")
    return folder
