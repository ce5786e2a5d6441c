"""How an encoder sees media: its geometry, told to the data room."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dilatant.config.errors import UserError
from dilatant.data.anyres_image_unit import AnyresImageUnit
from dilatant.data.aspect_image_unit import AspectImageUnit
from dilatant.data.audio_unit import AudioUnit
from dilatant.data.framed_clip_unit import FramedClipUnit, MiddleFrames
from dilatant.data.image_unit import RESAMPLE_NAMES, ImageUnit, PixelProcessor
from dilatant.data.native_clip_unit import CLIP_SETTINGS, FrameSampling, NativeClipUnit, frame_sampling
from dilatant.data.native_image_unit import NativeImageUnit, PatchProcessor, patch_processor
from dilatant.data.processors import (
    HuggingFaceImageProcessor,
    audio_processor,
    clip_settings,
    fixed_size,
    image_processor,
    sound_processor,
    whole_settings,
)
from dilatant.data.sample import MediaUnit, Written
from dilatant.data.soft_tokens import soft_token_processor
from dilatant.data.sound_unit import SoundUnit
from dilatant.data.tiled_image_unit import TiledImageUnit, check_tiles
from dilatant.models.geometry import MERGING_TOWERS, EncoderGeometry
from dilatant.models.whole import Whole


def media_unit(
    name: str,
    geometry: EncoderGeometry,
    *,
    processor: str | Mapping[str, Any] | None,
    placeholder_id: int,
    marker: str,
    merge: Literal["placeholder", "prepend"],
) -> ImageUnit | AudioUnit:
    """The `MediaUnit` of an encoder. processor: an id, a folder, settings, or None to fit the encoder's shape.

    Raises UserError when the processor makes something that the encoder does not take.
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
    return AudioUnit(
        name=name,
        placeholder_id=placeholder_id,
        tokens_per_window=geometry.encoder_tokens,
        merged_per_window=geometry.tokens_per_row,
        processor=audio_processor(processor, frames=geometry.frames, mel_bins=geometry.mel_bins),
        marker=marker,
        merge=merge,
    )


def units_of_merging(
    name: str,
    config: Any,
    *,
    processor: str | Mapping[str, Any] | None,
    placeholder_id: int,
    marker: str,
) -> tuple[MediaUnit, ...]:
    """The `MediaUnit`s of a tower of items of unlike sizes (see `merging_parts`) before any language model; images and
    clips have one. processor: as of `media_unit`. Raises UserError."""
    settings = whole_settings(processor) if isinstance(processor, str) else dict(processor or {})
    if MERGING_TOWERS[config.model_type] == "audio":
        return (_sound_unit(name, placeholder_id, config, settings, marker, None),)
    plain = {key: value for key, value in (settings or {}).items() if key not in CLIP_SETTINGS}
    of_clips = clip_settings(processor) if isinstance(processor, str) else {}
    return (
        NativeImageUnit(name, placeholder_id, _patches(config, plain), marker),
        NativeClipUnit(
            name,
            placeholder_id,
            *_clip_limits(config, {**of_clips, **(settings or {})}, of_clips, False),
            None,
        ),
    )


def units_of_whole(
    whole: Whole,
    processor: str | Mapping[str, Any] | None,
    tokenizer: Any,
    source: str | None = None,
) -> tuple[MediaUnit, ...]:
    """The `MediaUnit` of every tower of a whole model. processor: an id, a folder, or settings; settings that name no
    processor change those of `source`, an id or folder. Raises UserError."""
    if processor is None:
        processor = source
    elif isinstance(processor, Mapping) and source is not None and "image_processor_type" not in processor:
        processor = {**whole_settings(source), **processor}
    settings = whole_settings(processor) if isinstance(processor, str) else processor
    of_clips = {} if source is None else clip_settings(source)
    units: list[MediaUnit] = []
    for name, tower in whole.family.towers.items():
        of_frames = (*CLIP_SETTINGS, *(COUNTS if whole.family.frames_counted else ()))
        own = {k: v for k, v in settings.items() if k not in of_frames} if settings else settings
        units.append(_unit_of_tower(whole, name, own, tokenizer))
        if tower.native and tower.kind == "image" and not tower.pooled:
            units.append(_clip_unit(whole, name, {**of_clips, **(settings or {})}, of_clips, tokenizer))
        if whole.family.frames_counted:
            asked = {key: settings[key] for key in COUNTS if key in settings} if settings else {}
            units.append(_framed_unit(whole, name, {**(settings or {}), **of_clips, **asked}, tokenizer))
    return tuple(units)


def _clip_unit(
    whole: Whole, name: str, settings: Mapping[str, Any], saved: Mapping[str, Any], tokenizer: Any
) -> NativeClipUnit:
    """How a tower of native resolution sees clips. saved, settings: as of `_clip_limits`."""
    apart = whole.family.frames_apart
    return NativeClipUnit(
        name,
        whole.placeholder_ids[name],
        *_clip_limits(whole.config.vision_config, settings, saved, apart),
        whole.seconds_scale,
        apart,
        written=_written_clip(whole, tokenizer),
    )


def _clip_limits(
    vision: Any, settings: Mapping[str, Any], saved: Mapping[str, Any], apart: bool
) -> tuple[PatchProcessor, FrameSampling, int | None]:
    """How frames are cut into patches, which of them are taken, and the pixels of all together. saved: what the model's
    files say of clips; settings: all else. apart: whether limits are of all frames."""
    sampling = frame_sampling(settings)
    group = (vision.patch_size * vision.spatial_merge_size) ** 2
    size = saved.get("size") or {}
    limits = {
        "min_pixels": settings.get("video_min_pixels") or size.get("shortest_edge") or 128 * group,
        "max_pixels": settings.get("video_max_pixels")
        or size.get("longest_edge")
        or (24_576 if apart else 768) * group,
    }
    plain = {k: v for k, v in settings.items() if k not in (*CLIP_SETTINGS, "size")}
    processor = _patches(vision, {"image_processor_type": "", **plain, **limits})
    # 90 % of the context that the families reckon with.
    total = None if apart else int(settings.get("video_total_pixels") or 0.9 * 128_000 * group)
    return processor, sampling, total


def _patches(vision: Any, settings: Mapping[str, Any]) -> PatchProcessor:
    """How a tower with this config is shown images. Raises UserError."""
    return patch_processor(
        settings,
        patch=vision.patch_size,
        merge=vision.spatial_merge_size,
        frames=vision.temporal_patch_size,
    )


def _sound_unit(
    name: str,
    placeholder_id: int,
    config: Any,
    settings: Mapping[str, Any] | None,
    marker: str,
    written: Written | None,
) -> SoundUnit:
    # A tower with chunks has positions inside them alone.
    longest = None if hasattr(config, "n_window") else 2 * config.max_source_positions
    mel = sound_processor(settings, frames=longest or 3000, mel_bins=config.num_mel_bins)
    return SoundUnit(name, placeholder_id, mel, longest, 0 if longest is None else 2, marker, written)


COUNTS = ("num_frames", "fps", "video_fps")
"""What people call how many frames of a clip are seen as images."""


def _framed_unit(whole: Whole, name: str, settings: Mapping[str, Any], tokenizer: Any) -> FramedClipUnit:
    """How a tower of fixed size sees clips. Raises UserError."""
    geometry = whole.encoder(name).geometry
    image = _written(whole, name, tokenizer)
    count, fps = settings.get("num_frames"), settings.get("fps") or settings.get("video_fps") or 1.0
    for key, value in (("num_frames", 1 if count is None else count), ("fps", fps)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(f"processor: {key} is {value!r}; it must be a number above 0")
    plain: dict[str, Any] = {
        "mean": tuple(settings.get("image_mean") or (0.485, 0.456, 0.406)),
        "std": tuple(settings.get("image_std") or (0.229, 0.224, 0.225)),
        "resample": RESAMPLE_NAMES[int(settings.get("resample", 3))],
    }
    return FramedClipUnit(
        name,
        whole.placeholder_ids[name],
        geometry.encoder_tokens,
        geometry.tokens_per_row,
        PixelProcessor(geometry.height, geometry.row_width, geometry.channels, **plain),
        MiddleFrames(None if count is None else max(1, int(count)), float(fps)),
        written=Written(getattr(tokenizer, "video_token", None) or "<video>"),
        around_frame=(image.opens, image.closes),
    )


def _written_clip(whole: Whole, tokenizer: Any) -> Written:
    """The template writes one token between others, which stand around every patch of time where these are apart."""
    opens, token, closes = (
        "" if id_ is None or id_ >= len(tokenizer) else tokenizer.convert_ids_to_tokens(id_) or ""
        for id_ in (
            getattr(whole.config, key, None)
            for key in ("vision_start_token_id", "video_token_id", "vision_end_token_id")
        )
    )
    if whole.family.frames_apart:
        return Written(f"{opens}{token}{closes}" or "<video>", opens, closes)
    return Written(token or "<video>")


def _unit_of_tower(whole: Whole, name: str, settings: Mapping[str, Any] | None, tokenizer: Any) -> MediaUnit:
    tower = whole.family.towers[name]
    marker = f"<{tower.kind}>"
    written = _written(whole, name, tokenizer)
    placeholder = whole.placeholder_ids[name]
    if tower.kind == "audio":
        return _sound_unit(name, placeholder, whole.config.audio_config, settings, marker, written)
    if tower.native:
        vision = whole.config.vision_config
        if tower.pooled:
            pooled = soft_token_processor(
                settings or {}, patch=vision.patch_size, merge=vision.pooling_kernel_size
            )
            return NativeImageUnit(name, placeholder, pooled, marker, written)
        return NativeImageUnit(name, placeholder, _patches(vision, settings or {}), marker, written)
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


def _written(whole: Whole, name: str, tokenizer: Any) -> Written:
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
    return Written(
        text(tower.written or f"{{{tower.token}}}") or marker, text(tower.opens), text(tower.closes)
    )
