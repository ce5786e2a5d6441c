"""Starting config: the YAML for a one-line start from a model and data, by common defaults or by a recipe."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dilatant.config.files.remote_files import is_address

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
    folder: Path = Path(),
) -> dict[str, Any]:
    """Return the tree of a config. data, held_out: files, folders or hub ids. encoders: the encoder units of a whole
    model; None for a language model alone. folder: the folder of the file to be written; paths are given from the
    working folder. Without LoRA, encoders are frozen and everything else trains."""
    named = model_of(model, folder)
    projectors = [f"{unit}.projector" for unit in encoders or ()]
    optimizer: dict[str, Any] = {"learning_rate": LORA_RATE if lora else FULL_RATE, "weight_decay": 0.0}
    if encoders is None:
        tree: dict[str, Any] = {"language_model": {"id": named}, **({"lora": {}} if lora else {})}
    elif lora:
        tree = {"id": named, "lora": {"train": projectors}}
        optimizer["groups"] = {name: {"learning_rate": PROJECTOR_RATE} for name in projectors}
    else:
        tree = {"id": named, "freeze": [f"{unit}.encoder" for unit in encoders]}
    name = Path(model).name or "model"
    sources: dict[str, Any] = {"train": [source_of(each, folder) for each in data]}
    if held_out:
        sources["eval"] = [source_of(each, folder) for each in held_out]
    return {
        "output_dir": seen_from(output_dir, folder) if output_dir else f"runs/{name}{'-lora' if lora else ''}",
        "model": tree,
        "data": {**sources, "max_length": TOKENS},
        "train": {"global_batch_size": BATCH, "epochs": 1, "optimizer": optimizer},
    }


def seen_from(path: str, folder: Path) -> str:
    """Return a path of the working folder as a file in `folder` has to write it. It stays if it is absolute, an address
    or begins with `~` or a variable."""
    if path.startswith(("/", "~", "$")) or is_address(path):
        return path
    return os.path.relpath(path, os.path.realpath(folder))


def model_of(text: str, folder: Path) -> str:
    """Return the id that a file in `folder` has to write for a model, which is a folder or an id of the hub."""
    return seen_from(text, folder) if os.path.exists(text) else text


def source_of(text: str, folder: Path) -> dict[str, str]:
    """Return the data source that a file in `folder` has to write for a file, a folder or an id of the hub."""
    is_path = text.startswith(("/", "./", "../", "~")) or Path(text).suffix in _SUFFIXES
    is_path = is_path or is_address(text) or os.path.exists(text) or any(c in text for c in "*?[")
    return {"path": seen_from(text, folder)} if is_path else {"id": text}


def recipe_texts() -> dict[str, str]:
    """Return recipe name → YAML text, ordered by name. The first line of a text is a comment that sums it up."""
    folder = files("dilatant").joinpath("recipes")
    found = {each.name.removesuffix(".yaml"): each for each in folder.iterdir() if each.name.endswith(".yaml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def filled_in(
    text: str, folder: Path, model: str | None = None, data: Sequence[str] = (), output: str | None = None
) -> str:
    """Return a recipe's text with other values; everything else stays as written, comments included.

    folder: the folder of the file to be written; paths are given from the working folder, and rewritten for it.
    model: id or folder of a whole model, or of the language model if the recipe's model has parts. data: files, folders
    or ids to train on; they keep what all sources of the recipe have besides their places, such as a prompt.
    """
    tree = yaml.safe_load(text)
    if model is not None:
        keys = ("model", "id") if "id" in tree["model"] else ("model", "language_model", "id")
        text = _with_value(text, keys, model_of(model, folder))
    if data:
        first, *others = tree["data"]["train"]
        places = ("path", "id")
        common = {
            key: own for key, own in first.items() if key not in places and all(each.get(key) == own for each in others)
        }
        text = _with_value(text, ("data", "train"), [{**source_of(each, folder), **common} for each in data])
    if output is not None:
        text = _with_value(text, ("output_dir",), seen_from(output, folder))
    return text


def for_export_of_parts(text: str, encoder: str) -> str:
    """Return a recipe's text for an export whose encoder of images has this name: without the settings of a processor,
    which the export has itself."""
    lines = text.splitlines(keepends=True)
    document: Any = yaml.compose(text, yaml.SafeLoader)
    (section,) = (below for name, below in document.value if name.value == "model")
    for name, value in section.value:
        if name.value == "processor":
            del lines[name.start_mark.line : value.end_mark.line + 1]
    return re.sub(r"\bvision\b", encoder, "".join(lines))


def _with_value(text: str, keys: Sequence[str], value: Any) -> str:
    """Return a YAML text with another value of a key. The value that is replaced is a scalar or in flow style, since a
    block ends only where the next key begins, behind comments."""
    node: Any = yaml.compose(text, yaml.SafeLoader)
    for key in keys:
        node = next(below for name, below in node.value if name.value == key)
    written = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, sort_keys=False, width=1 << 20)
    return text[: node.start_mark.index] + written.strip()[1:-1] + text[node.end_mark.index :]
