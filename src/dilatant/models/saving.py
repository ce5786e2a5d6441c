"""Save and load a multimodal model: every unit in the Hugging Face layout, and one JSON manifest of their connections.

    folder/
      multimodal.json          the parts and how they are joined
      language/                the language model and its tokenizer, as transformers saves them
      <encoder>/               each encoder and its processor, as transformers saves them
      projectors/<encoder>.safetensors
      <generator>/             the denoiser, as diffusers saves it; in it vae/, its autoencoder, or target/, the vision
                               model whose features it generates, and scheduler/, which samples with it
      connectors/<generator>.safetensors   connector, learned queries, pooled condition

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

from dilatant.config.errors import UserError, as_user_error, list_problems
from dilatant.config.files.exports import MANIFEST, is_export_of_parts, read_object, write_object
from dilatant.config.model import MediaMask
from dilatant.models.adapters.lora import save_plain
from dilatant.models.core.weight_files import require_finite
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.generators.denoiser_source import read_source, scheduler_settings
from dilatant.models.generators.denoisers import build_diffusion, inspect_denoiser
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.generators.generator import Generator, GeneratorUnit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.media_attention import MediaMasks, OwnMask
from dilatant.models.sources import load_encoder, load_language_model

FORMAT = 1
_CALLBACKS = ("before_encoder", "after_encoder", "after_projector")
_CODE = ("projector", *_CALLBACKS)
_SETTINGS = ("merge", "features", "tokens_per_row")
"""Fields of an encoder that its entry in the manifest has unchanged."""


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
    own = [name for name, (_, unit) in encoders.items() if unit.config is None]
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
        _write_tensors(unit.projector.state_dict(), folder / "projectors" / f"{name}.safetensors")
        entries[name] = {
            "projector": encoder.projector if isinstance(encoder.projector, str) else None,
            "placeholder_id": language.text.placeholder_ids[name],
            **{key: getattr(encoder, key) for key in _SETTINGS},
            "code": [key for key in _CALLBACKS if getattr(encoder, key) is not None],
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

    code: encoder → its parts that are code ("projector" or a callback), which the folder lacks. dtype: default as
    saved. media_attention: the mask function, if the model has one. Raises UserError for a folder that is not such a
    model, and for missing code.
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
                **{key: entry.get(key) for key in ("projector", "placeholder_id", *_SETTINGS)},
                "processor": _load(AutoProcessor, folder / name, "preprocessor_config.json", "processor_config.json"),
                **code.get(name, {}),
            }
        )
        for name, entry in manifest["encoders"].items()
    }
    return SavedModel(
        encoders,
        load_language_model(folder / "language", f"{folder}: language", **options),
        _load(AutoTokenizer, folder / "language", "tokenizer_config.json"),
        media_attention or manifest.get("media_attention", "causal"),
        {
            name: {key: tensor if dtype is None else tensor.to(dtype) for key, tensor in state.items()}
            for name in encoders
            for state in [_read_tensors(folder / "projectors" / f"{name}.safetensors", "projector")]
        },
        load_generators(
            folder, manifest.get("generators", {}), {name: given.get("connector") for name, given in code.items()}
        ),
    )


def save_generators(
    folder: Path, language: LanguageUnit, generators: Mapping[str, tuple[Generator, GeneratorUnit]]
) -> dict[str, Any]:
    """Write the generators into `folder`, and the weights between them and the language model; return the manifest's
    entries. Raises UserError for a generator that is a user's own module."""
    entries = {}
    for name, (given, unit) in generators.items():
        if not isinstance(unit.model, Diffusion):
            raise UserError(f"{name}: a module of your own has no layout of diffusers; save its state_dict() yourself")
        net: Any = unit.model.net
        net.save_pretrained(folder / name)
        if unit.model.encoder is not None:
            place = "target" if unit.model.draws_features else "vae"
            unit.model.encoder.save_pretrained(folder / name / place)
        settings = scheduler_settings(unit.model.objective)
        write_object(folder / name / "scheduler" / "scheduler_config.json", settings)
        weights = _weights_between(language, name, unit, unit.model)
        _write_tensors(weights, folder / "connectors" / f"{name}.safetensors")
        has_queries = "queries" in language.parts and name in language.queries.counts
        entries[name] = {
            "connector": given.connector if isinstance(given.connector, str) else None,
            "connector_layers": given.connector_layers,
            "tokens_per_item": given.tokens_per_item,
            "token_id": None if has_queries else given.token_id,
            "loss_weight": given.loss_weight,
            "objective": unit.model.objective,
            "drop": unit.model.drop,
            "features": unit.model.draws_features,
            "sample_size": None if "sample_size" in net.config else unit.model.shape[1],
        }
    return entries


def load_generators(folder: Path, entries: Mapping[str, Any], connectors: Mapping[str, Any]) -> dict[str, Generator]:
    """Read what `save_generators` wrote, by the manifest's `entries`. connectors: name → connector that is a user's own
    module. Raises UserError."""
    generators = {}
    for name, entry in entries.items():
        where = f"{folder}: {name}"
        drawn = folder / name / "target"
        encoder = str(drawn) if entry.get("features") else None
        size = entry.get("sample_size")
        seen = inspect_denoiser(read_source(where, str(folder / name), None, None, encoder, size), where)
        connector = entry["connector"] or connectors.get(name)
        if connector is None:
            raise UserError(f"{where}: the connector is code; give it again as code={{{name!r}: {{'connector': ...}}}}")
        generators[name] = Generator(
            build_diffusion(seen, where, entry["objective"], entry["drop"], hollow=False),
            entry["token_id"],
            seen.width,
            connector,
            entry["tokens_per_item"],
            entry["loss_weight"],
            entry.get("connector_layers", 2),
        )
    return generators


@torch.no_grad()
def read_connectors(folder: Path, language: LanguageUnit, units: Mapping[str, GeneratorUnit]) -> None:
    """Load the weights between the language model and the generators. Raises UserError."""
    for name, unit in units.items():
        assert isinstance(unit.model, Diffusion)
        path = folder / "connectors" / f"{name}.safetensors"
        held = _weights_between(language, name, unit, unit.model)
        stored = _read_tensors(path, "connector")
        wrong = [key for key in held if key not in stored or stored[key].shape != held[key].shape]
        if wrong or stored.keys() != held.keys():
            raise UserError(f"{str(path)!r} does not hold the connector's weights: {', '.join(wrong) or 'more'}")
        for key, tensor in held.items():
            tensor.copy_(stored[key])


def _weights_between(language: LanguageUnit, name: str, unit: GeneratorUnit, model: Diffusion) -> dict[str, Tensor]:
    """Return the weights between language model and denoiser: connector, learned queries, pooled condition."""
    state = {f"connector.{key}": tensor for key, tensor in unit.connector.state_dict().items()}
    if model.pool is not None:
        state |= {f"pool.{key}": tensor for key, tensor in model.pool.state_dict().items()}
    if "queries" in language.parts and name in language.queries.counts:
        state["queries"] = language.queries.get_parameter(name)
    return state


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not is_export_of_parts(folder):
        raise UserError(f"{str(folder)!r} is not a saved multimodal model: it has no {MANIFEST}")
    manifest = read_object(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{str(folder / MANIFEST)!r} is not of format {FORMAT}, which this version reads")
    with as_user_error(f"{str(folder / MANIFEST)!r} is damaged", msgspec.ValidationError):
        units = msgspec.convert(manifest, _Manifest)
    if strange := [name for name in (*units.encoders, *units.generators) if not name.isidentifier()]:
        raise UserError(f"{str(folder / MANIFEST)!r} is damaged: {strange[0]!r} is no name of a unit")
    return manifest


def _check_code(
    folder: Path, manifest: Mapping[str, Any], code: Mapping[str, Mapping[str, Any]], of_model: Mapping[str, Any]
) -> None:
    entries = manifest["encoders"]
    drawn = manifest.get("generators", {})
    problems = [f"there is no encoder {name!r} to give code to" for name in code if name not in (*entries, *drawn)]
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


def _read_tensors(path: Path, what: str) -> dict[str, Tensor]:
    """Read a file with the weights of a projector or connector. Raises UserError."""
    with as_user_error(f"{str(path)!r} does not hold the {what}'s weights", OSError, SafetensorError):
        tensors = load_file(path)
    require_finite(tensors.items(), repr(str(path)))
    return tensors


def _write_tensors(state: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    state = {key: tensor.detach().contiguous() for key, tensor in state.items()}
    save_file(state, path, {"format": "pt"})


def _load(loader: Any, folder: Path, *files: str) -> Any:
    """Load a tokenizer or processor, or None where none of its `files` is there, without running code from the folder:
    a saved model is data. Raises UserError."""
    if not any((folder / name).is_file() for name in files):
        return None
    with as_user_error(f"{str(folder)!r} cannot be read"):
        return loader.from_pretrained(folder, trust_remote_code=False)
