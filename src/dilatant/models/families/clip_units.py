"""Video clips of pretrained families: the choice of frames, their size, and the text around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dilatant.config.errors import UserError
from dilatant.data.media_units.anyres_image_unit import AnyresClipUnit, AnyresImageUnit
from dilatant.data.media_units.frame_choice import FirstFrames, FrameChoice, MiddleFrames, SpreadFrames
from dilatant.data.media_units.framed_clip_unit import FramedClipUnit
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES, ImageUnit, PixelProcessor
from dilatant.data.media_units.native_clip_unit import (
    CLIP_SETTINGS,
    FrameSampling,
    NativeClipUnit,
    frame_sampling,
)
from dilatant.data.media_units.native_image_unit import NativeImageUnit, PatchProcessor, patch_processor
from dilatant.data.media_units.soft_token_image_unit import SOFT_TOKENS, SoftTokenProcessor
from dilatant.data.media_units.tiled_image_unit import TiledImageUnit
from dilatant.data.sample import MediaMarkup, MediaUnit
from dilatant.models.families.pretrained import PretrainedModel

ClipSettings = Mapping[str, Any]

COUNTS = ("num_frames", "fps", "video_fps", "max_frames", "video_maxlen")
"""Common setting names for the number of frames that are taken from a clip."""
SOFT_TOKENS_OF_FRAMES = "video_max_soft_tokens"
CLIP_KEYS = (*CLIP_SETTINGS, "num_frames", SOFT_TOKENS_OF_FRAMES)
"""Settings of a processor that affect clips only."""


def check_clip_settings(whole: PretrainedModel, asked: ClipSettings) -> None:
    """Raise UserError for clip settings that this family does not use."""
    style = whole.family.clips
    known: tuple[str, ...] = () if style is None else COUNTS
    if style in ("patches", "patches apart"):
        known = CLIP_SETTINGS
    if style == "timed":
        known = (*COUNTS, SOFT_TOKENS_OF_FRAMES)
    wrong = [key for key in asked if key in CLIP_KEYS and key not in known]
    if wrong:
        sees = f"knows of clips: {', '.join(known)}" if known else "sees no clips"
        raise UserError(
            f"model.processor: {', '.join(wrong)} says nothing to {whole.config.model_type}, which {sees}"
        )


def clip_unit(
    whole: PretrainedModel, image: MediaUnit, asked: ClipSettings, saved: ClipSettings, tokenizer: Any
) -> MediaUnit:
    """Build the clip unit that matches `image`, the same encoder's image unit. asked: the user's processor settings,
    including those of images; saved: the clip settings in the model's files. Raises UserError."""
    style = whole.family.clips
    assert style is not None
    if style in ("patches", "patches apart"):
        return _of_patches(whole, image.name, {**saved, **asked}, saved, tokenizer)
    counts = {key: value for key, value in asked.items() if key in (*COUNTS, SOFT_TOKENS_OF_FRAMES)}
    choice = frame_choice(style, saved, counts)
    written = MediaMarkup(_video_token(whole, tokenizer) or "<video>")
    if style == "pooled":
        assert isinstance(image, AnyresImageUnit)
        processor = _square(image.shape.tile, image.shape.tile, image.processor.channels, {**asked, **saved})
        return AnyresClipUnit(
            image.name,
            image.placeholder_id,
            image.tokens_per_tile,
            image.shape,
            processor,
            choice,
            written=written,
        )
    if style == "counted":
        frame: Any = _whole_frame(whole, image, {**asked, **saved})
    else:
        frame = image
    if isinstance(image, NativeImageUnit):
        assert isinstance(image.processor, SoftTokenProcessor)
        tokens = counts.get(SOFT_TOKENS_OF_FRAMES) or saved.get("max_soft_tokens") or SOFT_TOKENS[0]
        if tokens not in SOFT_TOKENS:
            known = ", ".join(map(str, SOFT_TOKENS))
            raise UserError(f"processor: {SOFT_TOKENS_OF_FRAMES} is {tokens!r}; it must be one of {known}")
        frame = replace(image, processor=replace(image.processor, soft_tokens=tokens))
    assert isinstance(frame, ImageUnit | TiledImageUnit | NativeImageUnit)
    return FramedClipUnit(frame, choice, style, written=written)


def frame_choice(style: str, saved: ClipSettings, asked: ClipSettings) -> FrameChoice:
    """Return the rule that chooses a clip's frames; requested settings override saved ones. Raises UserError."""
    own, said = ({key: value for key, value in each.items() if value is not None} for each in (asked, saved))
    fps, count = (
        own.get("fps", own.get("video_fps")),
        own.get("num_frames", own.get("max_frames", own.get("video_maxlen"))),
    )
    for name, value in (("num_frames", count), ("fps", fps)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
        ):
            raise UserError(f"processor: {name} is {value!r}; it must be a number above 0")
    most = None if count is None else max(1, int(count))
    if style == "introduced":
        sampling = said.get("video_sampling") or {}
        return SpreadFrames(
            float(fps or sampling.get("fps") or said.get("fps") or 1.0),
            int(most or sampling.get("max_frames") or said.get("num_frames") or 64),
        )
    if fps is None and most is None:
        fps, most = said.get("fps"), said.get("num_frames")
    if style == "counted":
        return MiddleFrames(most, float(fps or 1.0))
    return FirstFrames(32 if most is None else int(most), None if fps is None else float(fps))


def _of_patches(
    whole: PretrainedModel, name: str, settings: ClipSettings, saved: ClipSettings, tokenizer: Any
) -> NativeClipUnit:
    """Build the clip unit of a native-resolution encoder. saved, settings: as in `native_limits`."""
    apart = whole.family.frames_apart
    return NativeClipUnit(
        name,
        whole.placeholder_ids[name],
        *native_limits(whole.config.vision_config, settings, saved, apart),
        whole.seconds_scale,
        apart,
        written=_written_clip(whole, tokenizer),
    )


def native_limits(
    vision: Any, settings: ClipSettings, saved: ClipSettings, apart: bool
) -> tuple[PatchProcessor, FrameSampling, int | None]:
    """Return the frames' patch processor, the frame sampling, and the pixel limit over all frames. saved: the files'
    clip settings; settings: these, overridden by the user's. apart: True if limits apply to all frames together."""
    sampling = frame_sampling(settings)
    group = (vision.patch_size * vision.spatial_merge_size) ** 2
    size = saved.get("size") or {}
    limits = {
        "min_pixels": settings.get("video_min_pixels") or size.get("shortest_edge") or 128 * group,
        "max_pixels": settings.get("video_max_pixels")
        or size.get("longest_edge")
        or (24_576 if apart else 768) * group,
    }
    plain = {k: v for k, v in settings.items() if k not in (*CLIP_KEYS, "size")}
    processor = patches_of(vision, {"image_processor_type": "", **plain, **limits})
    # 90 % of the context length (128,000 tokens) that the families assume.
    total = None if apart else int(settings.get("video_total_pixels") or 0.9 * 128_000 * group)
    return processor, sampling, total


def patches_of(vision: Any, settings: ClipSettings) -> PatchProcessor:
    """Return the image processor of an encoder with this config. Raises UserError."""
    return patch_processor(
        settings,
        patch=vision.patch_size,
        merge=vision.spatial_merge_size,
        frames=vision.temporal_patch_size,
    )


def _whole_frame(whole: PretrainedModel, image: MediaUnit, settings: ClipSettings) -> ImageUnit:
    """Build the image unit of frames for a family that cuts images into tiles: one tile per frame."""
    geometry = whole.encoder(image.name).geometry
    return ImageUnit(
        image.name,
        image.placeholder_id,
        geometry.encoder_tokens,
        _square(geometry.height, geometry.row_width, geometry.channels, settings),
        geometry.tokens_per_row,
        written=image.written,
    )


def _square(height: int, width: int, channels: int, settings: ClipSettings) -> PixelProcessor:
    """Build a processor that resizes frames to this size without preserving their aspect ratio."""
    return PixelProcessor(
        height,
        width,
        channels,
        resample=RESAMPLE_NAMES[int(settings.get("resample", 3))],
        rescale=settings.get("rescale_factor", 1 / 255),
        mean=tuple(settings.get("image_mean") or (0.485, 0.456, 0.406)),
        std=tuple(settings.get("image_std") or (0.229, 0.224, 0.225)),
    )


def _video_token(whole: PretrainedModel, tokenizer: Any) -> str:
    """Return the chat template's token for a clip; empty if neither tokenizer nor config names one."""
    own = getattr(tokenizer, "video_token", None)
    return own or _token(getattr(whole.config, "video_token_id", None), tokenizer)


def _token(id_: int | None, tokenizer: Any) -> str:
    return "" if id_ is None or id_ >= len(tokenizer) else tokenizer.convert_ids_to_tokens(id_) or ""


def _written_clip(whole: PretrainedModel, tokenizer: Any) -> MediaMarkup:
    """Return the text of a clip: the template's single token, or start and end tokens around each temporal patch."""
    opens, token, closes = (
        _token(getattr(whole.config, key, None), tokenizer)
        for key in ("vision_start_token_id", "video_token_id", "vision_end_token_id")
    )
    if whole.family.frames_apart:
        return MediaMarkup(f"{opens}{token}{closes}" or "<video>", opens, closes)
    return MediaMarkup(token or "<video>")
