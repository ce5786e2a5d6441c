"""Patch-merger encoders of Qwen-VL and Qwen-Audio for any language model: items of different sizes are packed in one
row, and the encoder itself merges tokens before a new projector takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dilatant.config.errors import list_problems
from dilatant.models.core.geometry import PATCH_MERGER_ENCODERS
from dilatant.models.encoders.native_encoder import (
    NativeEncoderUnit,
    native_encoder_with_projector,
    width_of_merged,
)
from dilatant.models.encoders.sound_encoder import SoundEncoderUnit


def merged_width(config: Any) -> int:
    """Return the width of a row that the encoder outputs."""
    return (
        int(config.d_model)
        if PATCH_MERGER_ENCODERS[config.model_type] == "audio"
        else width_of_merged(config)
    )


def patch_merger_encoder(
    name: str,
    tower: PreTrainedModel,
    projector: Callable[[int], nn.Module],
    hidden_size: int,
    placeholder_id: int,
) -> NativeEncoderUnit | SoundEncoderUnit:
    """Build the unit. projector: builds a projector from the width of the encoder's rows. hidden_size: the language
    model's. placeholder_id: id of the token that a row replaces in the text."""
    made = projector(merged_width(tower.config))
    if PATCH_MERGER_ENCODERS[tower.config.model_type] == "audio":
        return SoundEncoderUnit(name, tower, made, hidden_size, placeholder_id)
    return native_encoder_with_projector(name, tower, made, hidden_size)


def refuse_options(where: str, **given: bool) -> None:
    """Raise UserError that lists the options which need rows of one size. given: option → True if the user set it."""
    problems = [
        f"{option}: its items are of unlike sizes, which this needs to be one; leave it out"
        for option, is_given in given.items()
        if is_given
    ]
    if problems:
        raise list_problems(f"{where} cannot have:", problems)
