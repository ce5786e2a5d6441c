"""Starting config: the YAML for a one-line start from a model and data, with common defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FULL_RATE, LORA_RATE, PROJECTOR_RATE = 1e-5, 1e-4, 1e-5
"""Learning rates of AdamW for fine-tuning: of all weights, of adapters, of projectors trained with adapters."""
_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".tar", ".csv", ".tsv", ".zip", ".gz")
BATCH, TOKENS = 16, 4096


def starting_config(
    model: str,
    data: list[str],
    held_out: list[str],
    encoders: tuple[str, ...] | None,
    lora: bool,
    output_dir: str | None = None,
) -> dict[str, Any]:
    """Return the tree of a config. data, held_out: files, folders or hub ids. encoders: the encoder units of a whole
    model; None for a language model alone. Without LoRA, encoders are frozen and everything else trains."""
    projectors = [f"{unit}.projector" for unit in encoders or ()]
    optimizer: dict[str, Any] = {"learning_rate": LORA_RATE if lora else FULL_RATE, "weight_decay": 0.0}
    if encoders is None:
        tree: dict[str, Any] = {"language_model": {"id": model}, **({"lora": {}} if lora else {})}
    elif lora:
        tree = {"id": model, "lora": {"train": projectors}}
        optimizer["groups"] = {name: {"learning_rate": PROJECTOR_RATE} for name in projectors}
    else:
        tree = {"id": model, "freeze": [f"{unit}.encoder" for unit in encoders]}
    name = Path(model).name or "model"
    sources: dict[str, Any] = {"train": [_source(each) for each in data]}
    if held_out:
        sources["eval"] = [_source(each) for each in held_out]
    return {
        "output_dir": output_dir or f"runs/{name}{'-lora' if lora else ''}",
        "model": tree,
        "data": {**sources, "max_length": TOKENS},
        "train": {"global_batch_size": BATCH, "epochs": 1, "optimizer": optimizer},
    }


def _source(text: str) -> dict[str, str]:
    is_path = text.startswith(("/", "./", "../", "~")) or Path(text).suffix in _SUFFIXES
    is_path = is_path or Path(text).expanduser().exists() or any(c in text for c in "*?[")
    return {"path": text} if is_path else {"id": text}
