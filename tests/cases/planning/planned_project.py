"""A project to plan: samples of unlike lengths, and a config whose layer costs are modelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dilatant.config import Config, parse_config

BATCH = 16
WIDTH = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
VISION = {
    "model_type": "siglip_vision_model",
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
    "num_hidden_layers": 2,
    "vision_use_head": False,
    **WIDTH,
}
LANGUAGE = {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 1, **WIDTH}


def write_samples(folder: Path, count: int) -> None:
    """Samples of unlike lengths, with no, one or several images."""
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 255, (8, 8), dtype=np.uint8)).save(folder / "one.png")
    lines = []
    for _ in range(count):
        images = [{"type": "image", "image": "one.png"}] * int(draw.integers(0, 4))
        text = {"type": "text", "text": "a" * int(draw.integers(1, 60))}
        lines.append(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": [*images, text]},
                        {"role": "assistant", "content": "b" * int(draw.integers(1, 12))},
                    ]
                }
            )
        )
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def model_section(**language: Any) -> dict[str, Any]:
    return {
        "encoders": {"vision": {"kind": "image", "projector": "linear", "config": VISION}},
        "language_model": {"tokenizer": "bytes", "config": LANGUAGE, **language},
        "freeze": ["vision.encoder"],
    }


def config(folder: Path, **sections: Any) -> Config:
    plan = {"microbatch_sizes": [2, 4], **sections.pop("plan", {})}
    debug = {"planned_steps": 2, **sections.pop("debug", {})}
    tree = {
        "output_dir": "run",
        "model": model_section(),
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 128, "workers": 0},
        "train": {"steps": 2, "global_batch_size": BATCH, "report_to": []},
        # Costs are then modelled: the same on any machine, and nothing is measured.
        "cluster": {"hardware": "H100", "gpus_per_node": 4},
        "plan": plan,
        "debug": debug,
        **sections,
    }
    return parse_config(tree, folder)


def text_config(
    folder: Path, language: dict[str, Any], batch: int, characters: tuple[int, int], **sections: Any
) -> Config:
    """Equal samples of so many characters of a question and its answer, and a config for a language model alone."""
    turns = [
        {"role": role, "content": "a" * count} for role, count in zip(("user", "assistant"), characters, strict=True)
    ]
    (folder / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 2 * batch, encoding="utf-8")
    train = {"steps": 2, "global_batch_size": batch, "report_to": [], **sections.pop("train", {})}
    return config(
        folder,
        model={"language_model": {"tokenizer": "bytes", "config": language}, **sections.pop("model", {})},
        data={"train": [{"path": "train.jsonl"}], "max_length": 4096, "workers": 0},
        train=train,
        plan={"microbatch_sizes": [1, 2], "measure_seconds": 0},
        debug={"planned_steps": 1},
        **sections,
    )
