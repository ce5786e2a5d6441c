"""Paths that are not relative to the YAML file: those in `--set` options, and those of a run that was moved."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilatant.config.environment import expand_path
from dilatant.config.errors import UserError

_PATHS = re.compile(
    r"output_dir|data\.(train|eval)\.\d+\.path|data\.cache_dir|parallel\.plan|train\.resume|cluster\.hardware_file|"
    r"plan\.costs"
)
_WORDS = ("never", "auto")
_PATHS_OR_IDS = re.compile(
    r"model\.(id|tokenizer|processor|lora\.adapter|language_model\.(id|tokenizer)|encoders\.[^.]+\.(id|processor)|"
    r"generators\.[^.]+\.(id|vae|target\.encoder))|data\.chat_template"
)


def from_working_folder(key: str, value: Any, base: Path) -> Any:
    """Return the value of `--set KEY=VALUE` with its paths resolved in the working folder, as a shell completes them.

    A path that exists only in the YAML file's folder `base` keeps its meaning there.
    """
    if isinstance(value, dict):
        return {name: from_working_folder(f"{key}.{name}", each, base) for name, each in value.items()}
    if isinstance(value, list):
        return [from_working_folder(f"{key}.{place}", each, base) for place, each in enumerate(value)]
    if not isinstance(value, str) or not value or "\0" in value:
        return value
    path = expand_path(value, Path.cwd())
    here, there = Path.cwd() / path, base / path
    if _PATHS.fullmatch(key) and value not in _WORDS:
        is_there = key != "output_dir" and there.exists() and not here.exists()
        return value if is_there else os.path.normpath(here)
    if _PATHS_OR_IDS.fullmatch(key) and value not in ("auto", "bytes", "plain") and here.exists():
        return os.path.normpath(here)
    return value


def follow_run(tree: dict[str, Any], folder: Path) -> list[str]:
    """Update the paths of a saved config to files that were moved along with its run, which is now in `folder`.

    Changes the tree and returns one line per changed path. Raises UserError for data that cannot be found.
    """
    before, now = str(tree.get("output_dir", "")), os.path.realpath(folder)
    changes: list[str] = []
    lost: list[str] = []
    for key, parent, place in _texts(tree, ""):
        path = parent[place]
        if not os.path.isabs(path) or os.path.exists(path):
            continue
        moved = os.path.normpath(os.path.join(now, os.path.relpath(path, before))) if before else path
        if key != "output_dir" and os.path.exists(moved):
            parent[place] = moved
            changes.append(f"{key}: {path} is gone; {moved}, which moved along with the run, is used")
        elif re.fullmatch(r"data\.(train|eval)\.\d+\.path", key) and not re.search(r"[*?\[{]", path):
            lost.append(f"{key}: {path!r} does not exist; --set {key}=PATH says where the data are now")
    if lost:
        raise UserError("\n".join(lost))
    return changes


def _texts(node: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield every text in a tree: (key, container, index or key in the container)."""
    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    for place, value in items:
        name = f"{key}.{place}" if key else str(place)
        if isinstance(value, str):
            yield name, node, place
        else:
            yield from _texts(value, name)
