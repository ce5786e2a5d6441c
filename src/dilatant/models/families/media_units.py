"""Media units of models: how `data` loads and counts the media of their encoders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dilatant.config.errors import UserError
from dilatant.data.media_units.native_clip_unit import CLIP_SETTINGS, NativeClipUnit
from dilatant.data.media_units.native_image_unit import NativeImageUnit
from dilatant.data.media_units.processed_unit import ProcessedImageUnit, ProcessedSoundUnit
from dilatant.data.media_units.processors import clip_settings, pretrained_settings
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS
from dilatant.models.encoders.encoder import EncoderUnit
from dilatant.models.encoders.media import CLIP_KEYS, media_unit, native_limits, patches_of
from dilatant.models.encoders.sound_encoder import sound_unit
from dilatant.models.encoders.tower import ClipOptions, Tower
from dilatant.models.families.pretrained import PretrainedModel


def units_of_patch_merger(
    name: str, config: Any, *, processor: str | Mapping[str, Any] | None, placeholder_id: int, marker: str
) -> tuple[MediaUnit, ...]:
    """Build the `MediaUnit`s of an encoder of `PATCH_MERGER_ENCODERS` with any language model: images and clips, or
    sounds. processor: as in `media_unit`. Raises UserError."""
    settings = pretrained_settings(processor) if isinstance(processor, str) else dict(processor or {})
    if PATCH_MERGER_ENCODERS[config.model_type] == "audio":
        return (sound_unit(name, placeholder_id, config, settings, marker),)
    plain = {key: value for key, value in (settings or {}).items() if key not in CLIP_SETTINGS}
    of_clips = clip_settings(processor) if isinstance(processor, str) else {}
    return (
        NativeImageUnit(name, placeholder_id, patches_of(config, plain), marker),
        NativeClipUnit(
            name, placeholder_id, *native_limits(config, {**of_clips, **(settings or {})}, of_clips, False), None
        ),
    )


def units_of_encoder(
    unit: EncoderUnit, merge: Literal["placeholder", "prepend"], **common: Any
) -> tuple[MediaUnit, ...]:
    """Build the `MediaUnit`s of an encoder of a model of parts. common: processor, placeholder_id and marker, as in
    `media_unit`. Raises UserError."""
    config = getattr(unit.model, "config", None)
    if getattr(config, "model_type", None) in PATCH_MERGER_ENCODERS:
        return units_of_patch_merger(unit.unit, config, **common)
    return (media_unit(unit.unit, unit.geometry, merge=merge, **common),)


def units_of_pretrained(
    whole: PretrainedModel, processor: str | Mapping[str, Any] | None, tokenizer: Any, source: str | None = None
) -> tuple[MediaUnit, ...]:
    """Build the `MediaUnit`s of every encoder of a pretrained multimodal model. processor: an id, a folder, or
    settings; settings that name no processor change those of `source`, an id or folder. Raises UserError."""
    requested = processor if isinstance(processor, Mapping) else {}
    _check_clip_settings(whole, requested)
    if processor is None:
        processor = source
    elif isinstance(processor, Mapping) and source is not None and "image_processor_type" not in processor:
        processor = {**pretrained_settings(source), **processor}
    settings = pretrained_settings(processor) if isinstance(processor, str) else processor
    folder = processor if source is None else source
    of_clips = clip_settings(folder) if isinstance(folder, str) else {}
    units: list[MediaUnit] = []
    plain = {k: v for k, v in settings.items() if k not in CLIP_KEYS} if settings else settings
    for name, tower in whole.family.towers.items():
        host = whole.host(name)
        unit = tower.media_unit(host, plain, _markup_of(tower, whole.config, tokenizer))
        units.append(unit)
        if tower.clips is not None:
            written = _markup_of_clips(tower, whole.config, tokenizer)
            words = {
                name: text
                for name in named_tokens(whole.config)
                if (text := _token(whole.config, f"{name}_id", tokenizer))
            }
            units.append(tower.clip_unit(host, unit, ClipOptions(settings or {}, of_clips, written, words)))
    _refuse_unread(units, requested)
    return tuple(units)


def _refuse_unread(units: Iterable[MediaUnit], requested: Mapping[str, Any]) -> None:
    """Raise UserError for requested settings that none of the units reads, if all have processors of transformers."""
    own = [unit.processor for unit in units if isinstance(unit, ProcessedImageUnit | ProcessedSoundUnit)]
    if len(own) < sum(unit.kind != "video" for unit in units):
        return
    known = set(CLIP_KEYS).union(*(processor.known_settings for processor in own))
    wrong = [key for key in requested if key not in known and not key.endswith("_type")]
    if wrong:
        raise UserError(f"model.processor: {wrong[0]} is no setting of {', '.join(type(p.made).__name__ for p in own)}")


def named_tokens(config: Any) -> list[str]:
    """Return the names of the tokens whose ids a config has: "vision_start_token" for `vision_start_token_id`."""
    return [
        key.removesuffix("_id")
        for key, id_ in vars(config).items()
        if key.endswith("_token_id") and isinstance(id_, int)
    ]


def _check_clip_settings(whole: PretrainedModel, requested: Mapping[str, Any]) -> None:
    """Raise UserError for clip settings that this family does not use."""
    known = [name for tower in whole.family.towers.values() for name in tower.clip_settings]
    wrong = [key for key in requested if key in CLIP_KEYS and key not in known]
    if wrong:
        sees = f"knows of clips: {', '.join(known)}" if known else "sees no clips"
        raise UserError(f"model.processor: {', '.join(wrong)} says nothing to {whole.config.model_type}, which {sees}")


def _markup_of(tower: Tower, config: Any, tokenizer: Any) -> MediaMarkup:
    def text(form: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda key: _token(config, key[1], tokenizer), form)

    token = text(tower.written or f"{{{tower.token}}}") or f"<{tower.kind}>"
    return MediaMarkup(token, text(tower.opens), text(tower.closes))


def _markup_of_clips(tower: Tower, config: Any, tokenizer: Any) -> MediaMarkup:
    """Return the text of a clip: the template's single token, or start and end tokens around each temporal patch."""
    token = _token(config, "video_token_id", tokenizer)
    if tower.clips not in ("patches", "patches apart"):
        return MediaMarkup(getattr(tokenizer, "video_token", None) or token or "<video>")
    if tower.clips == "patches":
        return MediaMarkup(token or "<video>")
    opens, closes = (_token(config, f"vision_{end}_token_id", tokenizer) for end in ("start", "end"))
    return MediaMarkup(f"{opens}{token}{closes}" or "<video>", opens, closes)


def _token(config: Any, key: str, tokenizer: Any) -> str:
    """Return the text of the token whose id is the config's value of `key`; empty if there is none."""
    id_ = getattr(config, key, None)
    return "" if id_ is None or id_ < 0 else tokenizer.convert_ids_to_tokens(id_) or ""
