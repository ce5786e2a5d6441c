"""Save and load generators: networks in diffusers' layout, and the weights between them and the language model.

folder/
  <generator>/             the denoiser, as diffusers saves it
  <generator>/vae/         its autoencoder, if it has one
  <generator>/target/      the vision model whose features it generates, if any, as transformers saves it
  <generator>/scheduler/   the diffusers scheduler that samples with it
  connectors/<generator>.safetensors   connector, learned queries, pooled condition
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dilatant.config.errors import UserError
from dilatant.models.generators.denoiser_source import read_source, scheduler_settings, write_json
from dilatant.models.generators.denoisers import build_diffusion, inspect_denoiser
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.generators.generator import Generator, GeneratorUnit
from dilatant.models.language.language import LanguageUnit

_TARGET = "target"


def save_generators(
    folder: Path, language: LanguageUnit, generators: Mapping[str, tuple[Generator, GeneratorUnit]]
) -> dict[str, Any]:
    """Write the layout above into `folder`; return the manifest's entries. Raises UserError for a generator that is a
    user's own module."""
    entries = {}
    for name, (given, unit) in generators.items():
        if not isinstance(unit.model, Diffusion):
            raise UserError(
                f"{name}: a module of your own has no layout of diffusers; save its state_dict() yourself"
            )
        net: Any = unit.model.net
        net.save_pretrained(folder / name)
        if unit.model.encoder is not None:
            place = _TARGET if unit.model.draws_features else "vae"
            unit.model.encoder.save_pretrained(folder / name / place)
        settings = scheduler_settings(unit.model.objective)
        write_json(folder / name / "scheduler" / "scheduler_config.json", settings)
        (folder / "connectors").mkdir(exist_ok=True)
        state = {
            key: tensor.detach().contiguous()
            for key, tensor in _joining(language, name, unit, unit.model).items()
        }
        save_file(state, folder / "connectors" / f"{name}.safetensors", {"format": "pt"})
        asked = "queries" in language.parts and name in language.queries.counts
        entries[name] = {
            "connector": given.connector if isinstance(given.connector, str) else None,
            "connector_layers": given.connector_layers,
            "tokens_per_item": given.tokens_per_item,
            "token_id": None if asked else given.token_id,
            "loss_weight": given.loss_weight,
            "objective": unit.model.objective,
            "drop": unit.model.drop,
            "features": unit.model.draws_features,
            "sample_size": None if "sample_size" in net.config else unit.model.shape[1],
        }
    return entries


def load_generators(
    folder: Path, entries: Mapping[str, Any], connectors: Mapping[str, Any]
) -> dict[str, Generator]:
    """Read what `save_generators` wrote, by the manifest's `entries`. connectors: name → connector that is a user's own
    module. Raises UserError."""
    generators = {}
    for name, entry in entries.items():
        where = f"{folder}: {name}"
        drawn = folder / name / _TARGET
        encoder = str(drawn) if entry.get("features") else None
        size = entry.get("sample_size")
        seen = inspect_denoiser(read_source(where, str(folder / name), None, None, encoder, size), where)
        connector = entry["connector"] or connectors.get(name)
        if connector is None:
            raise UserError(
                f"{where}: the connector is code; give it again as code={{{name!r}: {{'connector': ...}}}}"
            )
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
        own = _joining(language, name, unit, unit.model)
        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{str(path)!r} does not hold the connector's weights: {reason}") from None
        wrong = [key for key in own if key not in stored or stored[key].shape != own[key].shape]
        if wrong or stored.keys() != own.keys():
            raise UserError(
                f"{str(path)!r} does not hold the connector's weights: {', '.join(wrong) or 'more'}"
            )
        for key, tensor in own.items():
            tensor.copy_(stored[key])


def _joining(language: LanguageUnit, name: str, unit: GeneratorUnit, model: Diffusion) -> dict[str, Tensor]:
    """Return the weights between language model and denoiser: connector, learned queries, pooled condition."""
    state = {f"connector.{key}": tensor for key, tensor in unit.connector.state_dict().items()}
    if model.pool is not None:
        state |= {f"pool.{key}": tensor for key, tensor in model.pool.state_dict().items()}
    if "queries" in language.parts and name in language.queries.counts:
        state["queries"] = language.queries.get_parameter(name)
    return state
