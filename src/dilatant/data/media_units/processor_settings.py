"""Processor export: our processors as settings that transformers' classes, and `processors`, read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dilatant.data.media_units.anyres_image_unit import AnyresClipUnit
from dilatant.data.media_units.audio_unit import LogMelProcessor
from dilatant.data.media_units.frame_choice import FirstFrames, MiddleFrames, SpreadFrames
from dilatant.data.media_units.framed_clip_unit import FramedClipUnit
from dilatant.data.media_units.image_unit import RESAMPLE_NAMES, ImageProcessor, PixelProcessor
from dilatant.data.media_units.native_clip_unit import NativeClipUnit
from dilatant.data.media_units.native_image_unit import PatchProcessor
from dilatant.data.media_units.processors import HuggingFaceImageProcessor
from dilatant.data.media_units.soft_token_image_unit import SoftTokenProcessor
from dilatant.data.media_units.usm_sound_unit import UsmMelProcessor


def processor_settings(
    processor: ImageProcessor | LogMelProcessor | PatchProcessor | UsmMelProcessor,
) -> dict[str, Any]:
    """Return the content of `preprocessor_config.json` for a processor. Raises TypeError for any other class."""
    if isinstance(processor, HuggingFaceImageProcessor):
        return json.loads(processor.settings_json)
    if isinstance(processor, PixelProcessor):
        return _image_settings(processor)
    if isinstance(processor, SoftTokenProcessor):
        return {
            "image_processor_type": "Gemma4ImageProcessor",
            **size_limits(processor),
            "patch_size": processor.patch,
            "pooling_kernel_size": processor.merge,
            "resample": RESAMPLE_NAMES.index(processor.resample),
            "rescale_factor": processor.rescale,
        }
    if isinstance(processor, PatchProcessor):
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            **size_limits(processor),
            "patch_size": processor.patch,
            "merge_size": processor.merge,
            "temporal_patch_size": processor.frames,
            "resample": RESAMPLE_NAMES.index(processor.resample),
            "rescale_factor": processor.rescale,
            "image_mean": list(processor.mean),
            "image_std": list(processor.std),
        }
    if isinstance(processor, LogMelProcessor):
        return {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": processor.mel_bins,
            "sampling_rate": processor.sampling_rate,
            "hop_length": processor.hop_length,
            "n_fft": processor.fft_length,
            # transformers only has windows of whole seconds; the exact window is saved in addition.
            "chunk_length": -(-processor.window_samples // processor.sampling_rate),
            "n_samples": processor.window_samples,
            "nb_max_frames": processor.window_frames,
            "padding_value": 0.0,
        }
    if isinstance(processor, UsmMelProcessor):
        return {"feature_extractor_type": "Gemma4AudioFeatureExtractor", **asdict(processor)}
    raise TypeError(f"{type(processor).__name__} has no settings that transformers reads")


def size_limits(processor: PatchProcessor) -> dict[str, Any]:
    """Return the pixel limits, under both names that transformers has used for them, or the limit of soft tokens."""
    if isinstance(processor, SoftTokenProcessor):
        return {"max_soft_tokens": processor.soft_tokens}
    limits = {"min_pixels": processor.min_pixels, "max_pixels": processor.max_pixels}
    return {"size": {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}, **limits}


def clip_limits(
    unit: NativeClipUnit | FramedClipUnit | AnyresClipUnit, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the frame and size limits for `video_preprocessor_config.json`; before: its present content. If that is
    empty and the family's default rule applies, frame limits are left out."""
    if isinstance(unit, NativeClipUnit):
        return {**size_limits(unit.processor), **asdict(unit.sampling)}
    choice = unit.choice
    pooled = unit.frame.processor if isinstance(unit, FramedClipUnit) else None
    size = size_limits(pooled) if isinstance(pooled, SoftTokenProcessor) else {}
    if not before and choice == type(choice)():
        return size
    if isinstance(choice, SpreadFrames):
        found: dict[str, Any] = {"num_frames": choice.most, "fps": choice.fps}
        if "video_sampling" in before:
            own = {"max_frames": choice.most, "fps": choice.fps}
            found["video_sampling"] = {**before["video_sampling"], **own}
        return found
    # Only one of the two: transformers refuses both.
    assert isinstance(choice, FirstFrames | MiddleFrames)
    by_time = choice.fps is not None and (isinstance(choice, FirstFrames) or choice.count is None)
    return {"num_frames": None if by_time else choice.count, "fps": choice.fps if by_time else None, **size}


def _image_settings(processor: PixelProcessor) -> dict[str, Any]:
    fixed = {"height": processor.height, "width": processor.width}
    cropped = processor.shortest_edge is not None
    return {
        "image_processor_type": "CLIPImageProcessor" if cropped else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": processor.shortest_edge} if cropped else fixed,
        "do_center_crop": cropped,
        **({"crop_size": fixed} if cropped else {}),
        "resample": RESAMPLE_NAMES.index(processor.resample),
        "do_rescale": True,
        "rescale_factor": processor.rescale,
        "do_normalize": True,
        # transformers needs one value per channel.
        "image_mean": list(processor.mean) * (processor.channels // len(processor.mean)),
        "image_std": list(processor.std) * (processor.channels // len(processor.std)),
    }
