"""Save and load a multimodal model: every unit in the Hugging Face layout, and one JSON manifest of their connections.

    folder/
      multimodal.json          the parts and how they are joined
      language/                the language model and its tokenizer, as transformers saves them
      <encoder>/               each encoder and its processor, as transformers saves them
      projectors/<encoder>.safetensors
      <generator>/, connectors/   see `saving_generators`

Nothing is pickled. For code (callbacks, projectors that are a user's own modules) only the name is saved; pass the code
itself when you load the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from dilatant.config.errors import UserError, list_problems
from dilatant.config.files.exports import MANIFEST, is_export_of_parts, read_object
from dilatant.config.model import MediaMask
from dilatant.models.adapters.lora import save_plain
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.generators.generator import Generator, GeneratorUnit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.media_attention import MediaMasks, OwnMask
from dilatant.models.saving_generators import load_generators, save_generators
from dilatant.models.sources import load_encoder, load_language_model

FORMAT = 1
_CALLBACKS = ("before_encoder", "after_encoder", "after_projector")
_CODE = ("projector", "adapter", *_CALLBACKS)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The content of a folder. projectors: encoder → state dict. (Generators' connectors: see `read_connectors`.)"""

    encoders: dict[str, Encoder]
    language_model: PreTrainedModel
    tokenizer: Any
    media_attention: MediaMasks
    projectors: dict[str, dict[str, Tensor]]
    generators: dict[str, Generator]


class _EncoderEntry(msgspec.Struct):
    """An encoder's entry in a manifest."""

    projector: str | None
    placeholder_id: int
    merge: Literal["placeholder", "prepend"]
    features: Literal["all", "patch"]
    code: list[str]
    tokens_per_row: int | None = None


class _Manifest(msgspec.Struct):
    """Schema of a manifest, which validates untrusted files."""

    encoders: dict[str, _EncoderEntry]
    code: list[str]
    generators: dict[str, dict[str, Any]] = {}
    media_attention: MediaMask | dict[str, MediaMask] = "causal"


def save_model(
    folder: Path,
    language: LanguageUnit,
    encoders: Mapping[str, tuple[Encoder, EncoderUnit]],
    generators: Mapping[str, tuple[Generator, GeneratorUnit]],
    tokenizer: Any,
    media_attention: MediaMasks,
) -> None:
    """Write the layout above into `folder`, created if needed, with the tokenizer and processors that the model has.

    Raises UserError for an encoder that is no transformers model, and for a generator that is not of diffusers.
    """
    own = [name for name, (_, unit) in encoders.items() if unit.structure is None]
    if own:
        raise UserError(
            f"{', '.join(own)}: a module of your own has no Hugging Face layout; save its state_dict() yourself"
        )
    (folder / "projectors").mkdir(parents=True, exist_ok=True)
    save_plain(language.model, folder / "language")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder / "language"))
    entries = {}
    for name, (encoder, unit) in encoders.items():
        save_plain(cast(PreTrainedModel, unit.model), folder / name)
        if encoder.processor is not None:
            encoder.processor.save_pretrained(str(folder / name))
        state = {key: tensor.detach().contiguous() for key, tensor in unit.projector.state_dict().items()}
        save_file(state, folder / "projectors" / f"{name}.safetensors", {"format": "pt"})
        entries[name] = {
            "projector": encoder.projector if isinstance(encoder.projector, str) else None,
            "placeholder_id": language.text.placeholder_ids[name],
            "merge": encoder.merge,
            "features": encoder.features,
            "tokens_per_row": encoder.tokens_per_row,
            "code": [key for key in ("adapter", *_CALLBACKS) if getattr(encoder, key) is not None],
        }
    manifest = {
        "format": FORMAT,
        "encoders": entries,
        "generators": save_generators(folder, language, generators),
        "code": [
            *(["before_language_model"] if language.before_language_model is not None else []),
            *(["media_attention"] if callable(media_attention) else []),
        ],
        "media_attention": "causal" if callable(media_attention) else media_attention,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def load_model(
    folder: Path,
    *,
    code: Mapping[str, Mapping[str, Any]] | None = None,
    before_language_model: Callable[..., Any] | None = None,
    media_attention: OwnMask | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
) -> SavedModel:
    """Read what `save_model` wrote into `folder`.

    code: encoder → its parts that are code ("projector", "adapter" or a callback), which the folder lacks. dtype:
    default as saved. media_attention: the mask function, if the model has one. Raises UserError for a folder that is
    not such a model, and for missing code.
    """
    manifest = _read_manifest(folder)
    code = code or {}
    of_model = {"before_language_model": before_language_model, "media_attention": media_attention}
    _check_code(folder, manifest, code, of_model)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    encoders = {
        name: Encoder(
            **{
                "model": load_encoder(folder / name, f"{folder}: {name}", **options),
                "projector": entry["projector"],
                "placeholder_id": entry["placeholder_id"],
                "merge": entry["merge"],
                "features": entry["features"],
                "tokens_per_row": entry.get("tokens_per_row"),
                "processor": _load_processor(folder / name),
                **code.get(name, {}),
            }
        )
        for name, entry in manifest["encoders"].items()
    }
    return SavedModel(
        encoders,
        load_language_model(folder / "language", f"{folder}: language", **options),
        _load_tokenizer(folder / "language"),
        media_attention or manifest.get("media_attention", "causal"),
        {name: _read_projector(folder / "projectors" / f"{name}.safetensors", dtype) for name in encoders},
        load_generators(
            folder,
            manifest.get("generators", {}),
            {name: given.get("connector") for name, given in code.items()},
        ),
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not is_export_of_parts(folder):
        raise UserError(f"{str(folder)!r} is not a saved multimodal model: it has no {MANIFEST}")
    manifest = read_object(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{str(folder / MANIFEST)!r} is not of format {FORMAT}, which this version reads")
    try:
        units = msgspec.convert(manifest, _Manifest)
    except msgspec.ValidationError as error:
        raise UserError(f"{str(folder / MANIFEST)!r} is damaged: {error}") from None
    if strange := [name for name in (*units.encoders, *units.generators) if not name.isidentifier()]:
        raise UserError(f"{str(folder / MANIFEST)!r} is damaged: {strange[0]!r} is no name of a unit")
    return manifest


def _check_code(
    folder: Path,
    manifest: Mapping[str, Any],
    code: Mapping[str, Mapping[str, Any]],
    of_model: Mapping[str, Any],
) -> None:
    entries = manifest["encoders"]
    drawn = manifest.get("generators", {})
    problems = [
        f"there is no encoder {name!r} to give code to" for name in code if name not in (*entries, *drawn)
    ]
    for name, given in code.items():
        if name in drawn:
            problems += [f"{name}: {key!r} is not 'connector'" for key in given if key != "connector"]
            continue
        problems += [f"{name}: {key!r} is not one of {', '.join(_CODE)}" for key in given if key not in _CODE]
    for name, entry in entries.items():
        needed = [*entry["code"], *(["projector"] if entry["projector"] is None else [])]
        problems += [
            f"{name}: {key} is code; give it again as code={{{name!r}: {{{key!r}: ...}}}}"
            for key in needed
            if code.get(name, {}).get(key) is None
        ]
    problems += [f"{name} is code; give it again" for name in manifest["code"] if of_model.get(name) is None]
    if problems:
        raise list_problems(f"{str(folder)!r} cannot be loaded as it was saved:", problems)


def _read_projector(path: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{str(path)!r} does not hold the projector's weights: {reason}") from None
    return {key: tensor if dtype is None else tensor.to(dtype) for key, tensor in state.items()}


def _load_tokenizer(folder: Path) -> Any:
    return _load(AutoTokenizer, folder) if (folder / "tokenizer_config.json").is_file() else None


def _load_processor(folder: Path) -> Any:
    names = ("preprocessor_config.json", "processor_config.json")
    return _load(AutoProcessor, folder) if any((folder / name).is_file() for name in names) else None


def _load(loader: Any, folder: Path) -> Any:
    """Load a unit without running code from the folder: a saved model is data. Raises UserError."""
    try:
        return loader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{str(folder)!r} cannot be read: {reason}") from None
