"""Encoder geometry: the shapes of one item at both ends of an encoder, from its config alone, without weights or torch.

`data` uses it to count tokens and prepare media; `models` merges exactly that number of rows into the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dilatant.config.errors import UserError

Features = Literal["all", "patch"]

# Tokens before the patches (class, distillation and register tokens), by `model_type`.
_LEADING_TOKENS = {
    "siglip_vision_model": 0,
    "clip_vision_model": 1,
    "vit": 1,
    "dinov2": 1,
    "dinov2_with_registers": 1,
    "dinov3_vit": 1,
    "ijepa": 0,
    "internvl_vision": 1,
    "idefics3_vision": 0,
    "smolvlm_vision": 0,
    "deit": 2,
}

PATCH_MERGER_ENCODERS: dict[str, Literal["image", "audio"]] = {
    "qwen2_vl_vision": "image",
    "qwen2_5_vl_vision": "image",
    "qwen3_5_vision": "image",
    "qwen2_audio_encoder": "audio",
}
"""Encoders inside pretrained multimodal models that can feed other language models too (`native_encoder`): modality."""


@dataclass(frozen=True, slots=True)
class EncoderGeometry:
    """The shapes at both ends of an encoder. If items differ in size, those of one typical item: layers are measured
    with it, and costs use its ratio tokens_per_row / encoder_tokens.

    input_name: the keyword of the encoder's forward. An encoder row is one image, float [channels, height, width], or
    one sound clip, float [mel_bins, frames]. tokens_per_row: tokens that the language model receives for one row; with
    features "patch", without the leading_tokens (class and register tokens) of the encoder's output. encoder_tokens:
    tokens that the encoder's blocks process for one row. width: size of one output token before the projector. kind:
    "image", "audio", or a user's own word. example: keyword → tensor [1, ...], one row of each input of a user's own
    module.
    """

    kind: str
    input_name: str
    tokens_per_row: int
    encoder_tokens: int
    width: int
    leading_tokens: int = 0
    height: int = 0
    row_width: int = 0
    patch_size: int = 0
    channels: int = 0
    mel_bins: int = 0
    frames: int = 0
    example: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one encoder row of the input `input_name`."""
        if self.example is not None:
            return tuple(self.example[self.input_name].shape[1:])
        return (self.channels, self.height, self.row_width) if self.kind == "image" else (self.mel_bins, self.frames)


def encoder_geometry(config: Any, features: Features = "all") -> EncoderGeometry:
    """Return the geometry of a transformers encoder config (`config` is only read by attribute).

    features: "patch" drops class and register tokens; "all" passes every token on. Raises UserError if the config is
    not that of an image or audio encoder of fixed row size.
    """
    if all(getattr(config, key, None) is not None for key in ("num_mel_bins", "max_source_positions")):
        # Whisper: the second convolution halves the frames, and the forward accepts no other length.
        return EncoderGeometry(
            kind="audio",
            input_name="input_features",
            tokens_per_row=config.max_source_positions,
            encoder_tokens=config.max_source_positions,
            width=config.hidden_size,
            mel_bins=config.num_mel_bins,
            frames=2 * config.max_source_positions,
        )
    if getattr(config, "image_size", None) is None or getattr(config, "patch_size", None) is None:
        raise UserError(
            f"model_type {config.model_type!r} does not look like an encoder of fixed-size images or audio: "
            "its config has neither image_size and patch_size nor num_mel_bins and max_source_positions"
        )
    height, width = height_and_width(config.image_size)
    patch_height, patch_width = height_and_width(config.patch_size)
    if height < patch_height or width < patch_width:
        raise UserError(f"image_size {height}x{width} is smaller than patch_size {patch_height}x{patch_width}")
    leading = leading_tokens(config)
    patches = (height // patch_height) * (width // patch_width)
    return EncoderGeometry(
        kind="image",
        input_name="pixel_values",
        tokens_per_row=patches + (leading if features == "all" else 0),
        encoder_tokens=patches + leading,
        leading_tokens=leading,
        width=config.hidden_size,
        height=height,
        row_width=width,
        patch_size=patch_height,
        channels=_channels(config),
    )


def leading_tokens(config: Any) -> int:
    """Return the number of tokens before an image encoder's patches (class, distillation and register tokens). Raises
    UserError if it cannot be determined."""
    known = _LEADING_TOKENS.get(config.model_type)
    if known is None:
        # For a family that the table does not list, run the model on the meta device.
        from dilatant.models.core.structure import count_tokens

        height, width = height_and_width(config.image_size)
        patch_height, patch_width = height_and_width(config.patch_size)
        tokens = count_tokens(config, "pixel_values", (_channels(config), height, width))
        leading = tokens - (height // patch_height) * (width // patch_width)
        if leading < 0:
            raise UserError(
                f"model_type {config.model_type!r} returns {tokens} tokens for {height}x{width} pixels, fewer than it "
                "has patches; such an encoder is not supported"
            )
        return leading
    return known + int(getattr(config, "num_register_tokens", 0) or 0)


def _channels(config: Any) -> int:
    return int(getattr(config, "num_channels", 3))


def height_and_width(size: Any) -> tuple[int, int]:
    """Return height and width of a config's size, which is one number or two."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
