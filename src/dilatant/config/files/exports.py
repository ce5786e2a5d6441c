"""Exports as sources: use the export of a model of parts as the model of another run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.model import ModelConfig

MANIFEST = "multimodal.json"
CONVERSATION = "conversation.json"
PROJECTOR_FOLDER = "projectors"


def is_export_of_parts(folder: str | Path) -> bool:
    """Return True for a folder with a model of parts, as written by `dilatant export` and `save_pretrained`."""
    return os.path.isfile(Path(folder) / MANIFEST)  # not Path.is_file, which refuses long names


def encoders_of_export(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the `encoders` section for an export of parts. Raises UserError."""
    folder = Path(folder)
    conversation = read_object(folder / CONVERSATION)["encoders"] if (folder / CONVERSATION).is_file() else {}
    found: dict[str, dict[str, Any]] = {}
    for name, entry in read_object(folder / MANIFEST)["encoders"].items():
        is_audio = "num_mel_bins" in read_object(folder / name / "config.json")
        settings = conversation.get(name, {})
        found[name] = {
            "id": str(folder / name),
            "kind": settings.get("kind", "audio" if is_audio else "image"),
            "placeholder": settings.get("marker", ""),
            "features": entry["features"],
            "merge": entry["merge"],
            "projector": str(folder),
        }
    return found


def with_parts(config: ModelConfig) -> ModelConfig:
    """Replace a `model.id` that is an export of parts by its parts; return other configs unchanged. Raises UserError,
    also for settings that an export cannot represent."""
    if config.id is None or not is_export_of_parts(config.id):
        return config
    where = f"model.id: {config.id!r} is an export of parts"
    manifest = read_object(Path(config.id) / MANIFEST)
    if config.processor is not None:
        raise UserError(f"{where}; name them, with `processor` below its encoder")
    if config.generators or manifest.get("generators"):
        raise UserError(f"{where} with generators; name its parts one by one")
    tree = config.model_dump(exclude={"id", "language_model", "encoders", "generators", "processor"})
    language = {key: tree.pop(key) for key in ("tokenizer", "attn_implementation")}
    language["id"] = str(Path(config.id) / "language")
    try:
        language["media_attention"] = manifest.get("media_attention", "causal")
        code = [f"{name}.{key}" for name, entry in manifest["encoders"].items() for key in entry["code"]]
        code += manifest["code"]
        tree |= {"language_model": language, "encoders": encoders_of_export(config.id)}
        found = None if code else ModelConfig.model_validate(tree)
    except ValidationError as error:
        reasons = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise UserError(f"{where}: {reasons}") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{where}, but {MANIFEST} or {CONVERSATION} is damaged; export it again") from None
    if found is None:
        raise UserError(
            f"{where} with code of your own ({', '.join(code)}), which no config can give; load it by "
            "MultimodalModel.from_pretrained(FOLDER, code=...)"
        )
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose content is an object. Raises UserError."""
    with as_user_error(f"{str(path)!r} cannot be read", OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} is no object of JSON")
    return content


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file whose content is an object, in a folder that is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
