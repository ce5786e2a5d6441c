"""Weights from safetensors files: a rank opens the files of its units and reads its own tensors, nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilatant.config.errors import UserError, list_problems
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.unit import Unit

INDEX = "model.safetensors.index.json"


def read_weights(model: MultimodalModel, folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """The weights called `names` (logical), from a folder that `MultimodalModel.save_pretrained` wrote.

    Give them to `Runtime(weights=...)`. Raises UserError that lists the weights that the folder lacks.
    """
    weights: dict[str, Tensor] = {}
    for unit_name, unit in model.units.items():
        wanted = {weight.name for weight in unit.weights} & set(names)
        if not wanted:
            continue
        weights |= read_unit(unit, "model", wanted, tensor_files(folder / unit_name))
        if "projector" in unit.parts:
            projector = folder / "projectors" / f"{unit_name}.safetensors"
            weights |= read_unit(unit, "projector", wanted, _keys(projector))
    missing = sorted(set(names) - weights.keys())
    if missing:
        raise list_problems(f"{str(folder)!r} does not hold all weights of this model:", missing)
    return weights


def read_unit(unit: Unit, part: str, names: Collection[str], files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Those of `names` that belong to one part of a unit and are stored. files: stored key → file.

    Stored keys may have a prefix that the unit's own keys lack, or the reverse, as in the files of a larger model.
    """
    stored_as = _by_own_key([w.key for w in unit.weights if w.part == part], files)
    found: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for weight in unit.weights:
        if weight.part == part and weight.name in names and weight.key in stored_as:
            stored = stored_as[weight.key]
            found[files[stored]].append((weight.name, stored))
    weights = {}
    for file, entries in found.items():
        with _open(file) as tensors:
            for name, stored in entries:
                weights[name] = tensors.get_tensor(stored)
    return weights


def tensor_files(folder: Path) -> dict[str, Path]:
    """Stored key → file, of a model in the Hugging Face layout, in one file or sharded. Raises UserError."""
    index = folder / INDEX
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / file for key, file in shards.items()}
    return _keys(folder / "model.safetensors")


def _keys(file: Path) -> dict[str, Path]:
    with _open(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"weights cannot be read from {str(file)!r}: {' '.join(str(error).split())}"
        ) from None


def _by_own_key(own: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Own key → stored key: the same, or the only one that ends with it or that it ends with."""
    keys = list(stored)
    same = set(keys)
    by_last: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        by_last[key.rsplit(".", 1)[-1]].append(key)
    matched = {}
    for key in own:
        if key in same:
            matched[key] = key
            continue
        near = [
            other
            for other in by_last[key.rsplit(".", 1)[-1]]
            if other.endswith("." + key) or key.endswith("." + other)
        ]
        if len(near) == 1:
            matched[key] = near[0]
    return matched
