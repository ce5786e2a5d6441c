"""Building a multimodal model from the `model:` section of the YAML file."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dilatant.config.errors import UserError
from dilatant.config.model import LANGUAGE, EncoderConfig, GeneratorConfig, LoraConfig, ModelConfig
from dilatant.data.text.tokenizer import count_ids
from dilatant.models.adapters.lora import inject_parts, is_adapter
from dilatant.models.core.dtype import dtype_of_config, four_bit_names, require_four_bit
from dilatant.models.core.freeze import select, thaw
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS, encoder_geometry
from dilatant.models.core.materialize import seeded
from dilatant.models.core.weight_files import require_finite
from dilatant.models.encoders.encoder_spec import Encoder
from dilatant.models.encoders.projector import kind_of_projector, misfit, stored_projector
from dilatant.models.families.media_proof import in_proven_units
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.generators.denoiser_source import source_of_entry
from dilatant.models.generators.denoisers import InspectedDenoiser, build_diffusion, inspect_denoiser
from dilatant.models.generators.generator import Generator
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import attend_by_default
from dilatant.models.sources import load_encoder, load_language_model, load_pretrained_config, parse_config


def build_model(
    config: ModelConfig,
    seed: int = 0,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    hollow: Collection[str] | None = None,
    reads_weights: bool = True,
) -> MultimodalModel:
    """Build the multimodal model of the config: encoders, language model, generators, adapters and frozen parts.

    Random weights depend only on `seed`, the unit's name and the layer. vocab_size: number of ids of the tokenizer
    (default: of `tokenizer`); the vocabulary size of a language model from scratch whose config has none. hollow: on
    a pipeline rank, the units whose pretrained weights are not read here; these units, and units from scratch, stay on
    the meta device until the rank materialises its layers. (Weights of units with remote code are read nevertheless,
    unless `reads_weights` is False.) Raises UserError that names the key.
    """
    if vocab_size is None and tokenizer is not None:
        vocab_size = count_ids(tokenizer)
    if config.is_whole:
        return _build_pretrained(config, seed, vocab_size, tokenizer, hollow)
    source = config.text
    text: Any = source.id
    if source.config is not None:
        text = {**({} if vocab_size is None else {"vocab_size": vocab_size}), **_ends_of(tokenizer), **source.config}
    # Weights that a checkpoint lacks are drawn by the seed, so that all ranks draw the same.
    with seeded(seed, LANGUAGE):
        text = _config_or_source(text, LANGUAGE, hollow, source.trust_remote_code, reads_weights)
        language_model = load_language_model(
            text,
            "model.language_model",
            attn_implementation=None if source.attn_implementation == "dilatant" else source.attn_implementation,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
        )
    _check_vocabulary(language_model, vocab_size)
    encoders = {}
    for name, entry in config.encoders.items():
        where = f"model.encoders.{name}"
        with seeded(seed, name):
            model = load_encoder(
                _config_or_source(entry.id or entry.config, name, hollow, entry.trust_remote_code, reads_weights),
                where,
                dtype=torch.float32,
                trust_remote_code=entry.trust_remote_code,
            )
        kind = PATCH_MERGER_ENCODERS.get(model.config.model_type) or encoder_geometry(model.config).kind
        if kind != entry.kind:
            raise UserError(f"{where}: kind is {entry.kind!r}, but {model.config.model_type} reads {kind}")
        encoders[name] = Encoder(model, kind_of_projector(name, entry), merge=entry.merge, features=entry.features)
    if config.lora is not None:
        with seeded(seed, "lora"):
            inject_parts(language_model, {name: each.model for name, each in encoders.items()}, config.lora)
    mllm = MultimodalModel(
        encoders,
        language_model,
        tokenizer=tokenizer,
        seed=seed,
        device="cpu" if hollow is None else "meta",
        media_attention=source.media_attention,
        generators=_generators(config, seed, tokenizer, hollow),
    )
    if config.lora is not None:
        for unit in mllm.units.values():
            names = {w.canonical: w for w in reversed(unit.weights)}
            unit.freeze_names(
                frozenset(name for name, w in names.items() if w.part == "model" and not is_adapter(name))
            )
        _unfreeze_extra_weights(mllm, config.lora)
    mllm.freeze(config.freeze)
    _mark_four_bit(mllm, config.lora)
    for name, entry in config.encoders.items():
        _load_stored_projector(mllm.units[name].get_submodule("projector"), name, entry, reads=hollow is None)
    return mllm


def _load_stored_projector(projector: nn.Module, name: str, entry: EncoderConfig, reads: bool) -> None:
    """Load the stored projector that training continues from, if any, with a warning that names the file. A file that
    does not fit is an error (UserError) if the config names it, otherwise a warning."""
    file = stored_projector(name, entry)
    if file is None:
        return
    where = f"model.encoders.{name}.projector"
    why = misfit(file, projector)
    if why is not None and entry.goes_on:
        raise UserError(f"{where}: {str(file)!r} does not fit: {why}")
    if why is not None:
        warnings.warn(f"{where}: a new one begins; {str(file)!r} is not taken, for {why}", stacklevel=3)
        return
    warnings.warn(f"{where}: it goes on from {str(file)!r}", stacklevel=3)
    if reads:
        weights = load_file(file)
        require_finite(weights.items(), f"{where}: {str(file)!r}")
        projector.load_state_dict(weights)


def _mark_four_bit(mllm: MultimodalModel, lora: LoraConfig | None) -> None:
    """Record in the units the weights that stages hold in four bits. Raises UserError without bitsandbytes."""
    if lora is None or not lora.load_in_4bit:
        return
    require_four_bit()
    for name in dict.fromkeys(place.partition(".")[0] for place in lora.units):
        mllm.units[name].four_bit = four_bit_names(mllm.units[name])


def _generators(config: ModelConfig, seed: int, tokenizer: Any, hollow: Collection[str] | None) -> dict[str, Generator]:
    """Build the generators of the config. hollow: see `build_model`; if not None, all generators of a pretrained
    multimodal model stay on the meta device."""
    generators: dict[str, Generator] = {}
    if config.id is not None and not config.generators and (Path(config.id) / "generators.json").is_file():
        warnings.warn(f"model.id: the generators of {config.id!r} are left out", stacklevel=3)
    for name, seen in inspect_denoisers(config).items():
        drawn, where = config.generators[name], f"model.generators.{name}"
        beside = Path(drawn.id or "").parent / "connectors" / f"{Path(drawn.id or '').name}.safetensors"
        if beside.is_file():
            warnings.warn(f"{where}: a new connector begins; {str(beside)!r} is not taken", stacklevel=3)
        is_hollow = hollow is not None and (config.is_whole or name in hollow)
        with seeded(seed, name):
            objective = drawn.objective or seen.source.objective or "flow"
            module = build_diffusion(seen, where, objective, drawn.drop, is_hollow, drawn.cache_latents)
        generators[name] = Generator(
            module,
            token_of(drawn, tokenizer, where, len(generators)),
            seen.width,
            drawn.connector,
            drawn.tokens_per_item,
            drawn.loss_weight,
            drawn.connector_layers,
        )
    return generators


def _unfreeze_extra_weights(mllm: MultimodalModel, lora: LoraConfig) -> None:
    """Make weights of `lora.train` trainable. Raises UserError for a layer with an adapter: peft stores only one."""
    layers = {name.rpartition(".")[0]: name for name in select(mllm.units, lora.train) if not is_adapter(name)}
    adapted = {
        weight.name.partition(".lora_")[0]
        for unit in mllm.units.values()
        for weight in unit.weights
        if is_adapter(weight.name)
    }
    both = sorted(layers.keys() & adapted)
    if both:
        raise UserError(
            f"model.lora: {layers[both[0]]!r} would train whole ('train') and has an adapter ('units'); name parts "
            "there that do not meet, such as units: [language, vision.encoder] with train: [vision.projector]"
        )
    thaw(mllm.units, lora.train)


def inspect_denoisers(config: ModelConfig) -> dict[str, InspectedDenoiser]:
    """Inspect the denoiser of each generator without its weights. Raises UserError that names the key."""
    return {
        name: inspect_denoiser(source_of_entry(entry, where), where)
        for name, entry in config.generators.items()
        for where in [f"model.generators.{name}"]
    }


def token_of(entry: GeneratorConfig, tokenizer: Any, where: str, position: int) -> int | None:
    """Return the id of the tokens whose hidden states condition a generator; None for learned queries. Without a
    tokenizer (in planning) the id is arbitrary. Raises UserError if the text is not exactly one token."""
    if entry.token is None:
        return None
    if tokenizer is None:
        return position
    ids = tokenizer.encode(entry.token, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(
            f"{where}.token: {entry.token!r} is {len(ids)} tokens; name one of the tokenizer's own, or leave it out "
            "for learned queries"
        )
    return int(ids[0])


def open_pretrained(config: ModelConfig, **options: Any) -> PretrainedModel:
    """Open the pretrained multimodal model of `model.id` or `model.config` by its config alone. Its units and media are
    those of which it is proven that they train as in transformers. Raises UserError."""
    where = "model.id" if config.id is not None else "model.config"
    own = None if config.attn_implementation == "dilatant" else config.attn_implementation
    found = parse_config(config.config or {}, where) if config.id is None else load_pretrained_config(config.id, where)
    whole = PretrainedModel.of(found, where, attn_implementation=own, **options)
    return in_proven_units(whole, attend_by_default)


def _build_pretrained(
    config: ModelConfig, seed: int, vocab_size: int | None, tokenizer: Any, hollow: Collection[str] | None
) -> MultimodalModel:
    whole = open_pretrained(config, dtype=torch.float32, lora=config.lora)
    if config.config is not None:
        said = {**config.config, **config.config.get("text_config", {})}
        for name, token in _ends_of(tokenizer).items():
            if name not in said:
                setattr(whole.config.get_text_config(), name, token)
    if hollow is None and config.id is not None:
        raise UserError(
            "a whole model from an id is read by those who train it (`parallelize`, `dilatant train`); give "
            "hollow=() to build it without weights"
        )
    mllm = MultimodalModel(
        {},
        whole,
        tokenizer=tokenizer,
        seed=seed,
        device="cpu" if hollow is None else "meta",
        generators=_generators(config, seed, tokenizer, hollow),
    )
    _check_vocabulary(mllm.language.model, vocab_size)
    if config.lora is not None:
        _unfreeze_extra_weights(mllm, config.lora)
    mllm.freeze(config.freeze)
    _mark_four_bit(mllm, config.lora)
    return mllm


def source_dtypes(config: ModelConfig) -> dict[str, torch.dtype]:
    """Return unit → the dtype in which its source, a pretrained id or a config, stores weights."""
    dtypes = dict.fromkeys(config.generators, torch.float32)
    if config.is_whole:
        whole = open_pretrained(config)
        return dtypes | dict.fromkeys((*whole.family.towers, LANGUAGE), dtype_of_config(whole.config))
    where = "model.language_model"
    language = config.text
    sources = {LANGUAGE: (language.id, language.config, language.trust_remote_code, where)}
    for name, entry in config.encoders.items():
        sources[name] = (entry.id, entry.config, entry.trust_remote_code, f"model.encoders.{name}")
    for name, (id_, settings, own_code, where) in sources.items():
        source = load_pretrained_config(id_, where, own_code) if id_ else parse_config(settings or {}, where)
        dtypes[name] = dtype_of_config(source)
    return dtypes


def _config_or_source(
    source: Any, unit: str, hollow: Collection[str] | None, own_code: bool, reads_weights: bool
) -> Any:
    """Return the config of a pretrained model if this rank does not read the weights; otherwise `source` itself."""
    unwanted = hollow is not None and unit in hollow and not (own_code and reads_weights)
    return load_pretrained_config(source, unit, own_code) if unwanted and isinstance(source, str) else source


def _ends_of(tokenizer: Any) -> dict[str, int]:
    """Return the tokenizer's begin and end tokens, to replace the family's defaults in a model from scratch."""
    found = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")}
    return {name: token for name, token in found.items() if token is not None}


def _check_vocabulary(language_model: Any, vocab_size: int | None) -> None:
    rows = language_model.get_input_embeddings().num_embeddings
    if vocab_size is not None and vocab_size > rows:
        raise UserError(
            f"model.language_model: the tokenizer gives {vocab_size} ids, but the model embeds only {rows}; use the "
            "model's own tokenizer, or leave out vocab_size for a model from scratch"
        )
