"""How an encoder sees media: its geometry, told to the data room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dilatant.data.audio_unit import AudioUnit
from dilatant.data.image_unit import ImageUnit
from dilatant.data.processors import audio_processor, image_processor
from dilatant.models.geometry import EncoderGeometry


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
