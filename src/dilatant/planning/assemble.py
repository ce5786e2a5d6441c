"""Assembly of what a run works with, from its config: tokenizer, media units, samples, model.

The parts that need no weights come first, so that `data stats` and `data lint` see samples exactly as training does.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dilatant.config import Config, EncoderConfig, ModelConfig, UserError, list_problems
from dilatant.config.config import unit_problems
from dilatant.config.memory_modes import Recompute
from dilatant.config.model import ModelSource
from dilatant.data.index.sizes import Progress, SizesIndex, blend_sizes
from dilatant.data.media_units.image_target import ImageTarget, image_target
from dilatant.data.media_units.processors import image_processor
from dilatant.data.order.blend import Blend, StreamBlend, open_blend, open_own_data
from dilatant.data.sample import MediaUnit
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import count_ids, generation_ends, load_tokenizer
from dilatant.models.build import build_model, inspect_denoisers, open_pretrained, token_of
from dilatant.models.core.dtype import choose_fp8
from dilatant.models.core.freeze import choose_orthogonal
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS, encoder_geometry
from dilatant.models.encoders.media import media_unit
from dilatant.models.families.media_units import units_of_patch_merger, units_of_pretrained
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import attend_as_configured, place_rows, run_long_samples_alone
from dilatant.models.sources import encoder_config, load_pretrained_config, parse_config


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples to train on and to evaluate on, and how they become tokens. Sizes: see `with_sizes`."""

    tokenizer: Any
    encoding: Encoding
    train: Blend | StreamBlend
    held_out: Blend | StreamBlend | None
    train_sizes: SizesIndex | None = None
    held_out_sizes: SizesIndex | None = None

    @property
    def held_out_encoding(self) -> Encoding:
        """Encoding by which held-out samples are measured: each must have a question."""
        return replace(self.encoding, held_out=True)


def assemble_samples(config: Config) -> Samples:
    """Open the data and the tokenizer. Raises UserError before anything large is loaded."""
    size = config.data.val_size
    train, held_out = (_open_train(config), open_held_out(config)) if size is None else _split(config, size)
    tokenizer, encoding = assemble_encoding(config)
    if encoding.marks and isinstance(train, Blend):
        train = train.contrasted()
    if encoding.marks and isinstance(held_out, Blend):
        held_out = held_out.contrasted()
    return Samples(tokenizer, encoding, train, held_out)


def open_held_out(config: Config) -> Blend | StreamBlend | None:
    """Open the samples to evaluate on; None without any. Raises UserError."""
    data, own = config.data, config.part("eval_data")
    if own is not None:
        return open_own_data(own)
    if data.val_size is not None:
        return _split(config, data.val_size)[1]
    return open_blend(data.eval, cache_dir=data.cache_dir, held_out=True) if data.eval else None


def _open_train(config: Config) -> Blend | StreamBlend:
    data, own = config.data, config.part("train_data")
    if own is not None:
        return open_own_data(own, data.max_samples)
    return open_blend(data.train, cache_dir=data.cache_dir, max_samples=data.max_samples)


def _split(config: Config, size: float) -> tuple[Blend, Blend]:
    """Return the samples to train on and those that `data.val_size` holds out. Raises UserError."""
    train = _open_train(config)
    if not isinstance(train, Blend):
        raise UserError("data.val_size needs train_data that is read by index; pass eval_data instead")
    return train.split(size, config.seed)


def assemble_encoding(config: Config) -> tuple[Any, Encoding]:
    """Return the tokenizer, and how samples become tokens. No data are opened. Raises UserError."""
    data = config.data
    tokenizer = load_model_tokenizer(config.model)
    units = media_units(config.model, tokenizer)
    preferences = config.train.preferences
    return tokenizer, Encoding(
        chat=chat_tokenizer(
            tokenizer,
            data.chat_template,
            day=data.template_date,
            processed=config.model.is_whole and bool(units),
            ends=generation_ends(config.model.text.id),
        ),
        units=units,
        train_on=data.train_on,
        max_length=min(data.max_length, config.row_tokens),
        targets=image_targets(config.model, tokenizer),
        truncates=data.truncation == "right",
        pairs=preferences is not None,
        marks=preferences is not None and preferences.method == "kto",
        shares_prompt=preferences is None or preferences.share_prompt,
        system=data.system,
    )


def with_sizes(config: Config, samples: Samples, progress: Progress = lambda done, total: None) -> Samples:
    """Return the samples with the sizes of those that are read by index, measured now or known from before.

    Raises UserError that names samples which training would refuse, unless these are to be skipped.
    """

    def sizes(blend: Blend | StreamBlend | None, encoding: Encoding) -> SizesIndex | None:
        if not isinstance(blend, Blend):
            return None
        return blend_sizes(
            blend, encoding, cache_dir=config.data.cache_dir, workers=config.data.workers, progress=progress
        )

    sized = replace(
        samples,
        train_sizes=sizes(samples.train, samples.encoding),
        held_out_sizes=sizes(samples.held_out, samples.held_out_encoding),
    )
    for target in samples.encoding.targets:
        sizes_of = sized.train_sizes
        if sizes_of is not None and not sizes_of.of(target.name).any():
            raise UserError(
                f"model.generators.{target.name}: no sample of data.train has an {target.kind} in an assistant's turn, "
                "so it would never learn to draw; add such samples, or remove the generator"
            )
    if config.data.on_error == "error":
        found = [
            f"{name}: {why}"
            for name, index in (("data.train", sized.train_sizes), ("data.eval", sized.held_out_sizes))
            if index is not None
            for why in index.refused(samples.encoding.max_length).values()
        ]
        if found:
            more = [f"and {len(found) - 8:,} more"] if len(found) > 8 else []
            raise list_problems(
                "samples that cannot be trained on (`dilatant data lint` lists all; 'data.on_error: skip' leaves them "
                "out):",
                [*found[:8], *more],
            )
    index = sized.train_sizes
    if index is not None and index.desired is not None:
        marks = np.unique(np.delete(index.desired, list(index.refused(samples.encoding.max_length))))
        if len(marks) == 1:
            raise UserError(
                f"data.train: all answers are marked {'true' if marks[0] else 'false'}, and kto learns from good and "
                "bad ones; add the other kind"
            )
    return sized


def assemble_model(config: Config, tokenizer: Any, encoding: Encoding, hollow: bool = False) -> MultimodalModel:
    """Build the config's model as it trains: it embeds the tokens of samples, and recomputes activations where
    configured. hollow: on the meta device, for ranks to allocate their own layers. Raises UserError."""
    units = config.model.units if hollow else None
    model = build_model(config.model, seed=config.seed, tokenizer=tokenizer, hollow=units)
    if found := unit_problems(config.parallel, tuple(model.units)):
        raise list_problems("config has a mistake:", found)
    attend_as_configured(model, config.model.text)
    if (why := run_long_samples_alone(model.language, encoding.max_length)) is not None:
        what = "every sample is a row and a microbatch of its own"
        warnings.warn(f"{what}: {why}; a data.max_length of no more avoids that", stacklevel=3)
    place_rows(model, config.parallel.placement)
    seen = {unit.name: unit.placeholder_id for unit in encoding.units}
    seen |= {target.name: target.placeholder_id for target in encoding.targets}
    placed = model.placeholder_ids if model.whole is None else model.whole.placeholder_ids
    expected = {**placed, **model.output_ids}
    if seen != expected:
        raise RuntimeError(f"data places {seen}, the model expects {expected}")
    for name, how in recompute_by_unit(config, model.units).items():
        model.units[name].recompute(how or "none")
    model.language.loss_chunk = config.train.loss_chunk
    choose_orthogonal(model.units, config.train.optimizer.muon)
    choose_fp8(model.units, config.train.precision)
    return model


def recompute_by_unit(config: Config, units: Collection[str]) -> dict[str, Recompute | None]:
    """Return `train.recompute` for every unit; None leaves it to the plan. Raises UserError for unknown units."""
    wanted = config.train.recompute
    if wanted is None or isinstance(wanted, str):
        return dict.fromkeys(units, wanted)
    unknown = [name for name in wanted if name not in units]
    if unknown:
        raise UserError(f"train.recompute: no unit {' or '.join(map(repr, unknown))}; there are {', '.join(units)}")
    return {name: wanted.get(name, "none") for name in units}


def load_model_tokenizer(config: ModelConfig) -> Any:
    """Load the tokenizer that the config names, or the language model's own. Raises UserError."""
    source = config.text
    name = source.tokenizer or source.id
    where = "model" if config.is_whole else "model.language_model"
    if name is None:
        raise UserError(f"{where}.tokenizer is missing; give an id or a folder, or 'bytes' for the built-in one")
    if source.tokenizer is None:  # a wrong id is not a tokenizer error
        load_pretrained_config(name, where, source.trust_remote_code)
    return load_tokenizer(name, source.trust_remote_code, f"{where}.tokenizer")


def media_units(config: ModelConfig, tokenizer: Any) -> tuple[MediaUnit, ...]:
    """Return how each encoder sees its media, from configs alone: no weights are read. Raises UserError."""
    if config.is_whole:
        return units_of_pretrained(open_pretrained(config), config.processor, tokenizer, config.id)
    vocabulary = _vocabulary(config, count_ids(tokenizer))
    return tuple(
        unit
        for position, (name, entry) in enumerate(config.encoders.items())
        for unit in _media_units(name, entry, vocabulary + position)
    )


def image_targets(config: ModelConfig, tokenizer: Any) -> tuple[ImageTarget, ...]:
    """Return what each generator draws, from configs alone. Raises UserError that names the key."""
    if not config.generators:
        return ()
    encoders = open_pretrained(config).family.towers if config.is_whole else config.encoders
    first = _vocabulary(config, count_ids(tokenizer)) + len(encoders)
    targets = []
    for position, (name, seen) in enumerate(inspect_denoisers(config).items()):
        entry = config.generators[name]
        token = token_of(entry, tokenizer, f"model.generators.{name}", position)
        channels, height, width = seen.pixels
        encoder = None if entry.target is None else entry.target.encoder
        source = encoder if isinstance(encoder, str) else None
        targets.append(
            image_target(
                name,
                placeholder_id=first + position if token is None else token,
                tokens_per_item=entry.tokens_per_item,
                start=entry.start,
                marker=entry.marker,
                pixels=seen.pixels,
                processor=None
                if encoder is None
                else image_processor(source, height=height, width=width, channels=channels),
            )
        )
    return tuple(targets)


def _vocabulary(config: ModelConfig, tokenizer_size: int) -> int:
    settings = _transformers_config(config.text, "model.language_model", vocab_size=tokenizer_size)
    return settings.get_text_config().vocab_size


def _transformers_config(source: ModelSource, where: str, **defaults: Any) -> Any:
    """Return the config of a model, given by settings or by its source. Raises UserError."""
    if source.config is not None:
        return parse_config({**defaults, **source.config}, where)
    return load_pretrained_config(str(source.id), where, source.trust_remote_code)


def _media_units(name: str, entry: EncoderConfig, placeholder_id: int) -> tuple[MediaUnit, ...]:
    # A pretrained encoder brings its own processor.
    processor = entry.id if entry.processor is None else entry.processor
    try:
        config = encoder_config(_transformers_config(entry, f"model.encoders.{name}"))
        geometry = None if config.model_type in PATCH_MERGER_ENCODERS else encoder_geometry(config, entry.features)
        kind = PATCH_MERGER_ENCODERS[config.model_type] if geometry is None else geometry.kind
        if kind != entry.kind:
            raise UserError(f"kind is {entry.kind!r}, but the encoder reads {kind}")
        common: dict[str, Any] = {"processor": processor, "placeholder_id": placeholder_id, "marker": entry.marker}
        if geometry is None:
            return units_of_patch_merger(name, config, **common)
        return (media_unit(name, geometry, merge=entry.merge, **common),)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith("model.") else f"model.encoders.{name}.{text}") from None
