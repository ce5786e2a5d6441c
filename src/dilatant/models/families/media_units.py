"""Media units of encoders: encoder geometry as the `MediaUnit` with which `data` loads and counts media."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dilatant.config.errors import UserError
from dilatant.data.media_units.anyres_image_unit import AnyresImageUnit
from dilatant.data.media_units.aspect_image_unit import AspectImageUnit
from dilatant.data.media_units.audio_unit import AudioUnit
from dilatant.data.media_units.image_unit import ImageUnit
from dilatant.data.media_units.native_clip_unit import CLIP_SETTINGS, NativeClipUnit
from dilatant.data.media_units.native_image_unit import NativeImageUnit
from dilatant.data.media_units.processors import (
    HuggingFaceImageProcessor,
    audio_processor,
    clip_settings,
    fixed_size,
    image_processor,
    pretrained_settings,
    sound_processor,
)
from dilatant.data.media_units.soft_token_image_unit import soft_token_processor
from dilatant.data.media_units.sound_unit import SoundUnit
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit, check_tiles
from dilatant.data.media_units.usm_sound_unit import UsmSoundUnit, usm_processor
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS, EncoderGeometry
from dilatant.models.encoders.conformer_encoder import mel_bins_of
from dilatant.models.families.clip_units import (
    CLIP_KEYS,
    check_clip_settings,
    clip_unit,
    native_limits,
    patches_of,
)
from dilatant.models.families.pretrained import PretrainedModel


def media_unit(
    name: str,
    geometry: EncoderGeometry,
    *,
    processor: str | Mapping[str, Any] | None,
    placeholder_id: int,
    marker: str,
    merge: Literal["placeholder", "prepend"],
) -> ImageUnit | AudioUnit:
    """Build the `MediaUnit` of an encoder. processor: an id, a folder, settings, or None to fit the encoder's shape.

    Raises UserError if the processor's output does not fit the encoder.
    """
    if geometry.kind == "image":
        return ImageUnit(
            name=name,
            placeholder_id=placeholder_id,
            tokens_per_image=geometry.encoder_tokens,
            merged_per_image=geometry.tokens_per_row,
            processor=image_processor(
                processor, height=geometry.height, width=geometry.row_width, channels=geometry.channels
            ),
            marker=marker,
            merge=merge,
        )
    if geometry.kind != "audio":
        raise UserError(
            f"{name}: no reader of files knows the kind {geometry.kind!r}; give `execute` samples of your own "
            "(`EncodedSample`)"
        )
    return AudioUnit(
        name=name,
        placeholder_id=placeholder_id,
        tokens_per_window=geometry.encoder_tokens,
        merged_per_window=geometry.tokens_per_row,
        processor=audio_processor(processor, frames=geometry.frames, mel_bins=geometry.mel_bins),
        marker=marker,
        merge=merge,
    )


def units_of_patch_merger(
    name: str,
    config: Any,
    *,
    processor: str | Mapping[str, Any] | None,
    placeholder_id: int,
    marker: str,
) -> tuple[MediaUnit, ...]:
    """Build the `MediaUnit`s of a patch-merger encoder (see `patch_merger_encoder`) with any language model: images
    and clips, or sounds. processor: as in `media_unit`. Raises UserError."""
    settings = pretrained_settings(processor) if isinstance(processor, str) else dict(processor or {})
    if PATCH_MERGER_ENCODERS[config.model_type] == "audio":
        return (_sound_unit(name, placeholder_id, config, settings, marker, None),)
    plain = {key: value for key, value in (settings or {}).items() if key not in CLIP_SETTINGS}
    of_clips = clip_settings(processor) if isinstance(processor, str) else {}
    return (
        NativeImageUnit(name, placeholder_id, patches_of(config, plain), marker),
        NativeClipUnit(
            name,
            placeholder_id,
            *native_limits(config, {**of_clips, **(settings or {})}, of_clips, False),
            None,
        ),
    )


def units_of_pretrained(
    whole: PretrainedModel,
    processor: str | Mapping[str, Any] | None,
    tokenizer: Any,
    source: str | None = None,
) -> tuple[MediaUnit, ...]:
    """Build the `MediaUnit`s of every encoder of a pretrained multimodal model. processor: an id, a folder, or
    settings; settings that name no processor change those of `source`, an id or folder. Raises UserError."""
    if isinstance(processor, Mapping):
        check_clip_settings(whole, processor)
    if processor is None:
        processor = source
    elif isinstance(processor, Mapping) and source is not None and "image_processor_type" not in processor:
        processor = {**pretrained_settings(source), **processor}
    settings = pretrained_settings(processor) if isinstance(processor, str) else processor
    of_clips = {} if source is None else clip_settings(source)
    units: list[MediaUnit] = []
    for name, tower in whole.family.towers.items():
        own = {k: v for k, v in settings.items() if k not in CLIP_KEYS} if settings else settings
        unit = _unit_of_encoder(whole, name, own, tokenizer)
        units.append(unit)
        if whole.family.clips is not None and tower.kind == "image":
            units.append(clip_unit(whole, unit, settings or {}, of_clips, tokenizer))
    return tuple(units)


def _sound_unit(
    name: str,
    placeholder_id: int,
    config: Any,
    settings: Mapping[str, Any] | None,
    marker: str,
    written: MediaMarkup | None,
) -> SoundUnit:
    # An encoder with chunks has positions only inside them.
    longest = None if hasattr(config, "n_window") else 2 * config.max_source_positions
    mel = sound_processor(settings, frames=longest or 3000, mel_bins=config.num_mel_bins)
    return SoundUnit(name, placeholder_id, mel, longest, 0 if longest is None else 2, marker, written)


def _unit_of_encoder(
    whole: PretrainedModel, name: str, settings: Mapping[str, Any] | None, tokenizer: Any
) -> MediaUnit:
    tower = whole.family.towers[name]
    marker = f"<{tower.kind}>"
    written = _markup_of(whole, name, tokenizer)
    placeholder = whole.placeholder_ids[name]
    if tower.kind == "audio":
        config = whole.config.audio_config
        if tower.conformer:
            usm = usm_processor(settings, mel_bins_of(config))
            return UsmSoundUnit(name, placeholder, usm, marker, written)
        return _sound_unit(name, placeholder, config, settings, marker, written)
    if tower.native:
        vision = whole.config.vision_config
        if tower.pooled:
            pooled = soft_token_processor(
                settings or {}, patch=vision.patch_size, merge=vision.pooling_kernel_size
            )
            return NativeImageUnit(name, placeholder, pooled, marker, written)
        return NativeImageUnit(name, placeholder, patches_of(vision, settings or {}), marker, written)
    geometry = whole.encoder(name).geometry
    if tower.crossing:
        if settings is None or "image_processor_type" not in settings:
            raise UserError(
                f"model.processor is missing: {whole.config.model_type} cuts images into tiles as its own says"
            )
        cutting = HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True), geometry.channels)
        return AspectImageUnit(name, placeholder, geometry.encoder_tokens, cutting, marker, written)
    shape = (geometry.channels, geometry.height, geometry.row_width)
    if settings is not None and "image_processor_type" in settings:
        settings = {**settings, **tower.settings}
        if tower.anyres:
            maker = HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True), geometry.channels)
            return AnyresImageUnit(
                name, placeholder, geometry.encoder_tokens, whole.anyres_shape, maker, marker, written
            )
        if fixed_size(settings, geometry.channels) is None:
            tiling = HuggingFaceImageProcessor(json.dumps(settings, sort_keys=True), geometry.channels)
            check_tiles(tiling, shape)
            return TiledImageUnit(
                name,
                placeholder,
                geometry.encoder_tokens,
                geometry.tokens_per_row,
                shape,
                tiling,
                marker,
                written,
            )
    if tower.anyres:
        raise UserError(
            f"model.processor is missing: {whole.config.model_type} cuts images into tiles as its own processor says"
        )
    plain = media_unit(
        name, geometry, processor=settings, placeholder_id=placeholder, marker=marker, merge="placeholder"
    )
    return replace(plain, written=written)


def _markup_of(whole: PretrainedModel, name: str, tokenizer: Any) -> MediaMarkup:
    tower = whole.family.towers[name]

    def text(form: str) -> str:
        for key in re.findall(r"\{(\w+)\}", form):
            token = getattr(whole.config, key, None)
            token = (
                None if token is None or token >= len(tokenizer) else tokenizer.convert_ids_to_tokens(token)
            )
            form = form.replace(f"{{{key}}}", token or "")
        return form

    marker = f"<{tower.kind}>"
    return MediaMarkup(
        text(tower.written or f"{{{tower.token}}}") or marker, text(tower.opens), text(tower.closes)
    )
