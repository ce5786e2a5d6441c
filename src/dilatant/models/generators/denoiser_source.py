"""Denoiser sources: settings and stored weights in diffusers' layout, found without building the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from dilatant.config.errors import UserError
from dilatant.config.model import GeneratorConfig
from dilatant.models.generators.diffusion import Objective
from dilatant.models.generators.target_encoders import FeatureSource

_SUBFOLDERS = ("transformer", "unet")
"""Subfolders of a diffusers pipeline that may hold the denoiser."""
_PREDICTIONS: dict[str, Objective] = {
    "epsilon": "epsilon", "v_prediction": "velocity", "flow_prediction": "flow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DenoiserSource:
    """The source of a denoiser. settings, vae_settings: diffusers configs, with `_class_name`. folder, vae_folder:
    location of the pretrained weights, as (id or folder, subfolder); None initialises at random. features: the vision
    model whose features it generates, instead of an autoencoder's latents. objective: the pretraining's, if the source
    has it. sample_size: height and width of the generated latents or pixels, if not in the settings."""

    settings: Mapping[str, Any]
    folder: tuple[str, str] | None = None
    vae_settings: Mapping[str, Any] | None = None
    vae_folder: tuple[str, str] | None = None
    features: FeatureSource | None = None
    objective: Objective | None = None
    sample_size: int | None = None

    @property
    def has_weights(self) -> bool:
        """True if any part has stored weights."""
        features = self.features is not None and self.features.id is not None
        return self.folder is not None or self.vae_folder is not None or features


def read_source(
    where: str,
    id: str | None,
    config: Mapping[str, Any] | None,
    vae: str | Mapping[str, Any] | None,
    encoder: str | Mapping[str, Any] | None = None,
    sample_size: int | None = None,
) -> DenoiserSource:
    """Read the settings of a denoiser, from `config` or from the folder or hub id of a denoiser or a pipeline. vae: an
    id, a folder or settings; None takes the pipeline's autoencoder, if it has one. encoder: a vision model of
    transformers, whose features are generated instead. sample_size: see `DenoiserSource`. Raises UserError."""
    if config is not None:
        settings, folder, objective, own_vae = dict(config), None, None, None
    else:
        assert id is not None
        settings, folder = _settings_of(where, id, _SUBFOLDERS)
        scheduler = _stored_json(id, "scheduler/scheduler_config.json")
        objective = None if scheduler is None else _objective_of(scheduler)
        own_vae = _stored_json(id, "vae/config.json")
    vae_settings, vae_folder = None, None
    if encoder is not None:
        seen = FeatureSource.read(encoder, f"{where}.target.encoder")
        return DenoiserSource(settings, folder, None, None, seen, objective, sample_size)
    if isinstance(vae, str):
        vae_settings, vae_folder = _settings_of(f"{where}.vae", vae, ("vae",))
    elif vae is not None:
        vae_settings = dict(vae)
    elif own_vae is not None:
        assert id is not None
        vae_settings, vae_folder = own_vae, (id, "vae")
    return DenoiserSource(settings, folder, vae_settings, vae_folder, None, objective, sample_size)


def source_of_entry(entry: GeneratorConfig, where: str) -> DenoiserSource:
    """Read the source of a generator's config entry. Raises UserError."""
    encoder = None if entry.target is None else entry.target.encoder
    return read_source(where, entry.id, entry.config, entry.vae, encoder, entry.sample_size)


def _settings_of(where: str, source: str, subfolders: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, str]]:
    for subfolder in (*subfolders, ""):
        found = _stored_json(source, f"{subfolder}/config.json" if subfolder else "config.json")
        if found is not None and "_class_name" in found:
            return found, (source, subfolder)
    raise UserError(
        f"{where}: {source!r} is not here in diffusers' layout: no config.json with a _class_name in it or in its "
        f"{' or '.join(subfolders)}; give a folder, or download it first (`hf download`)"
    )


def _stored_json(source: str, name: str) -> dict[str, Any] | None:
    """Read a JSON file of a folder, or of a hub id (cached or downloaded); None if it cannot be read."""
    try:
        path: Any = Path(source, name)
        if not Path(source).is_dir():
            path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
        found = None if path is None else json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _objective_of(scheduler: Mapping[str, Any]) -> Objective | None:
    if "FlowMatch" in str(scheduler.get("_class_name", "")):
        return "flow"
    return _PREDICTIONS.get(str(scheduler.get("prediction_type", "epsilon")))


def scheduler_settings(objective: Objective) -> dict[str, Any]:
    """Return the config of the diffusers scheduler that samples with this objective."""
    if objective == "flow":
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": 1000,
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": "epsilon" if objective == "epsilon" else "v_prediction",
        "clip_sample": False,
        "set_alpha_to_one": False,
    }
