"""Paths of a run that was moved together with its files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dilatant.config.errors import UserError


def follow_run(tree: dict[str, Any], folder: Path, needs_data: bool = True) -> list[str]:
    """Update the paths of a saved config to files that were moved along with its run, which is now in `folder`.

    Changes the tree and returns one line per changed path. Raises UserError for data that cannot be found, unless the
    command does not read them: then a line says so.
    """
    before, now = str(tree.get("output_dir", "")), os.path.realpath(folder)
    changes: list[str] = []
    lost: list[tuple[str, str]] = []
    for key, parent, place in texts_in(tree):
        path = parent[place]
        if not os.path.isabs(path) or os.path.exists(path):
            continue
        moved = os.path.normpath(os.path.join(now, os.path.relpath(path, before))) if before else path
        if key != "output_dir" and os.path.exists(moved):
            parent[place] = moved
            changes.append(f"{key}: {path} is gone; {moved}, which moved along with the run, is used")
        elif re.fullmatch(r"data\.(train|eval)\.\d+\.path", key) and not re.search(r"[*?\[{]", path):
            lost.append((key, path))
    if lost and not needs_data:
        changes += [f"{key}: {path!r} does not exist; nothing is checked against these data" for key, path in lost]
    elif lost:
        lines = [f"{key}: {path!r} does not exist; --set {key}=PATH says where the data are now" for key, path in lost]
        raise UserError("\n".join(lines))
    return changes


def texts_in(node: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield every text in a tree: (key, container, index or key in the container)."""
    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    for place, value in items:
        name = f"{key}.{place}" if key else str(place)
        if isinstance(value, str):
            yield name, node, place
        else:
            yield from texts_in(value, name)
