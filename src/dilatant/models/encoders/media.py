"""Media units of encoders, from their geometry and from processor settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from dilatant.config.errors import UserError
from dilatant.data.media_units.audio_unit import AudioUnit
from dilatant.data.media_units.frame_choice import FirstFrames, FrameChoice, MiddleFrames, SpreadFrames
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES, ImageUnit, PixelProcessor
from dilatant.data.media_units.native_clip_unit import CLIP_SETTINGS, FrameSampling, frame_sampling
from dilatant.data.media_units.native_image_unit import PatchProcessor, patch_processor
from dilatant.data.media_units.processors import audio_processor, image_processor
from dilatant.models.core.geometry import EncoderGeometry

ClipSettings = Mapping[str, Any]

COUNTS = ("num_frames", "fps", "video_fps", "max_frames", "video_maxlen")
"""Common setting names for the number of frames that are taken from a clip."""
SOFT_TOKENS_OF_FRAMES = "video_max_soft_tokens"
CLIP_KEYS = (*CLIP_SETTINGS, "num_frames", SOFT_TOKENS_OF_FRAMES)
"""Settings of a processor that affect clips only."""


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


def frame_choice(style: str, saved: ClipSettings, requested: ClipSettings) -> FrameChoice:
    """Return the rule that chooses a clip's frames; requested settings override saved ones. Raises UserError."""
    asked_for, stored = (
        {key: value for key, value in each.items() if value is not None} for each in (requested, saved)
    )
    fps, count = (
        asked_for.get("fps", asked_for.get("video_fps")),
        asked_for.get("num_frames", asked_for.get("max_frames", asked_for.get("video_maxlen"))),
    )
    for name, value in (("num_frames", count), ("fps", fps)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
        ):
            raise UserError(f"processor: {name} is {value!r}; it must be a number above 0")
    most = None if count is None else max(1, int(count))
    if style == "introduced":
        sampling = stored.get("video_sampling") or {}
        return SpreadFrames(
            float(fps or sampling.get("fps") or stored.get("fps") or 1.0),
            int(most or sampling.get("max_frames") or stored.get("num_frames") or 64),
        )
    if fps is None and most is None:
        fps, most = stored.get("fps"), stored.get("num_frames")
    if style == "counted":
        return MiddleFrames(most, float(fps or 1.0))
    return FirstFrames(32 if most is None else int(most), None if fps is None else float(fps))


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
        settings, patch=vision.patch_size, merge=vision.spatial_merge_size, frames=vision.temporal_patch_size
    )


def resized_frames(height: int, width: int, channels: int, settings: ClipSettings) -> PixelProcessor:
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
