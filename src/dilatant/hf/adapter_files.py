"""Adapter files of peft: written so that plain peft loads them on the plain model, and read as peft saved them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from dilatant.config.errors import UserError, list_problems
from dilatant.config.files.own_files import read_text
from dilatant.config.model import LoraConfig, ModelConfig
from dilatant.models.adapters.lora import MAGNITUDE, PREFIX, adapted_key, adapter_config, is_adapter, plain_key
from dilatant.models.core.stage import stage_tensors
from dilatant.models.core.unit import Unit
from dilatant.models.core.weights import Weight
from dilatant.models.experts.expert_lora import expert_key, is_of_experts, to_peft
from dilatant.models.multimodal import MultimodalModel

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTERS = "adapter"
"""Folder of an export that holds its adapters."""


_BY_LAYER = ("rank_pattern", "alpha_pattern", "alora_invocation_tokens")
"""Settings of peft by which single layers differ in rank or scale, or adapters in the tokens that they change."""


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A transformers model with adapters. folder: of its files, within that of all adapters. units: those that are
    parts of it. key_of: the name in the model's own state dict of a unit's weight, None for a weight outside it.
    source: the id or folder that it came from."""

    folder: str
    units: tuple[Unit, ...]
    key_of: Callable[[Unit, Weight], str | None]
    source: str | None = None


def adapted_models(model: MultimodalModel, config: ModelConfig) -> Iterator[AdaptedModel]:
    """Yield a pretrained VLM as one model; else each unit with adapters."""
    if config.lora is None:
        return
    whole = model.whole
    if whole is not None:
        yield AdaptedModel("", tuple(model.units.values()), whole.key_of, config.id)
        return
    sources = {name: entry.id for name, entry in config.encoders.items()}
    sources[model.graph.anchor] = config.text.id
    for name, unit in model.units.items():
        if any(is_adapter(weight.name) for weight in unit.weights):
            yield AdaptedModel(name, (unit,), _of_part, sources[name])


def write_adapter(adapted: AdaptedModel, lora: LoraConfig, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, with the modules that were trained in full."""
    state: dict[str, Tensor] = {}
    names, saved, of_experts = set(), set(), set()
    keys = _file_keys(adapted)
    for unit, weight, key in _weights(adapted):
        if is_of_experts(key):
            of_experts.add(adapted_key(key))
        elif is_adapter(weight.name):
            names.add(adapted_key(key).removesuffix(".weight"))
        elif weight.canonical in unit.trained_names:  # peft ties no copies, so a tied weight is written twice
            saved.add(key.rpartition(".")[0])
        else:
            continue
        tensor = stage_tensors(unit)[weight.canonical].detach().contiguous()
        tensor = to_peft(key, tensor).contiguous() if is_of_experts(key) else tensor
        state[keys[weight.name]] = tensor if weight.tied_to is None else tensor.clone()
    folder.mkdir(parents=True, exist_ok=True)
    adapter_config(lora, names, saved, adapted.source, of_experts).save_pretrained(str(folder))
    save_file(state, folder / ADAPTER_FILE, {"format": "pt"})


def adapter_keys(adapted: AdaptedModel, files: Iterable[str], lora: LoraConfig, folder: Path) -> dict[str, str]:
    """Return logical name → stored key for a peft folder. files: its stored keys. Raises UserError if the adapter is
    not the model's."""
    settings = adapter_settings(folder)
    settings_here: dict[str, Any] = {"r": lora.r, "lora_alpha": lora.lora_alpha, "peft_type": "LORA"}
    settings_here |= {"use_rslora": lora.use_rslora, "use_dora": lora.use_dora}
    settings = {"use_rslora": False, "use_dora": False, **settings}
    wrong = [
        f"{key} is {settings.get(key)!r} there and {value!r} here"
        for key, value in settings_here.items()
        if settings.get(key) != value
    ]
    wrong += [f"{key} is {settings[key]!r} there, which is not read" for key in _BY_LAYER if settings.get(key)]
    keys = {key: name for name, key in _file_keys(adapted).items()}
    stored = set(files)
    wrong += [f"it has {key!r}, which this model has not" for key in stored if key not in keys]
    wrong += [f"it lacks {key!r}" for key, name in keys.items() if is_adapter(name) and key not in stored]
    if wrong:
        more = [f"and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise list_problems(f"model.lora.adapter: {str(folder)!r} does not fit:", [*wrong[:8], *more])
    return {keys[key]: key for key in stored}


def adapter_settings(folder: Path) -> Mapping[str, Any]:
    """Read `adapter_config.json`. Raises UserError."""
    try:
        settings = json.loads(read_text(folder / "adapter_config.json"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model.lora.adapter: {str(folder)!r} is no adapter of peft: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _weights(adapted: AdaptedModel) -> Iterator[tuple[Unit, Weight, str]]:
    for unit in adapted.units:
        for weight in unit.weights:
            key = adapted.key_of(unit, weight)
            if key is not None:
                yield unit, weight, key


def _file_keys(adapted: AdaptedModel) -> dict[str, str]:
    """Return logical name → key in an adapter file, where a DoRA magnitude has no `.weight` suffix."""
    keys = {weight.name: key for _, weight, key in _weights(adapted)}
    of_experts = {adapted_key(key) for key in keys.values() if is_of_experts(key)}
    return {
        name: PREFIX
        + (
            expert_key(key, of_experts)
            if is_of_experts(key)
            else key.removesuffix(".weight")
            if MAGNITUDE in key
            else key
        )
        for name, key in keys.items()
    }


def _of_part(unit: Unit, weight: Weight) -> str | None:
    return plain_key(weight.key) if weight.part == "model" else None
