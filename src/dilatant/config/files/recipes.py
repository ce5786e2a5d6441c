"""Recipes: configs by task that ship with Dilatant, and the values in them that a user fills in."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from dilatant.config.start import model_of, seen_from, source_of


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


def _with_value(text: str, keys: Sequence[str], value: Any) -> str:
    """Return a YAML text with another value of a key. The value that is replaced is a scalar or in flow style, since a
    block ends only where the next key begins, behind comments."""
    node: Any = yaml.compose(text, yaml.SafeLoader)
    for key in keys:
        node = next(below for name, below in node.value if name.value == key)
    written = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, sort_keys=False, width=1 << 20)
    return text[: node.start_mark.index] + written.strip()[1:-1] + text[node.end_mark.index :]
