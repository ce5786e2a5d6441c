"""Encoder adapters: running slices of encoders whose forward does more than embed, run blocks and normalise.

A slice without its embedding normally runs the family's own forward with hidden states in place of the input. This
fails if the forward itself processes the input (checks its length, convolves it). In that case `resume` runs the slice
from hidden states by calling the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.models.core.geometry import height_and_width


@dataclass(frozen=True, slots=True)
class Adapter:
    """Runs slices of one family. resume(slice, hidden) → hidden: runs a slice that begins after the embedding; [rows,
    tokens, width] both. embed: embeds a slice's input [rows, ...] in families whose forward would change the rows; by
    default the forward runs."""

    resume: Callable[[nn.Module, Tensor], Tensor]
    embed: Callable[[nn.Module, Tensor], Tensor] | None = None


def _resume_whisper(model: Any, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        # Whisper's encoder may skip layers in training (LayerDrop).
        if not (model.training and model.layerdrop > 0 and torch.rand([]) < model.layerdrop):
            hidden = layer(hidden, None)
    return model.layer_norm(hidden)


def _resume_idefics(model: Any, hidden: Tensor) -> Tensor:
    # The forward would derive a patch mask from the pixel size; here all patches are visible.
    return model.post_layernorm(model.encoder(inputs_embeds=hidden).last_hidden_state)


def _resume_dinov3(model: Any, hidden: Tensor) -> Tensor:
    # The forward would derive positions from the pixel size.
    size = height_and_width(model.config.image_size)
    places = model.rope_embeddings(torch.empty(1, 1, *size, device=hidden.device))
    return model.norm(model.model(hidden, position_embeddings=places).last_hidden_state)


def _embed_pixtral(model: Any, pixels: Tensor) -> Tensor:
    return model.ln_pre(model.patch_conv(pixels).flatten(2).transpose(1, 2))


def _resume_pixtral(model: Any, hidden: Tensor) -> Tensor:
    # The forward would concatenate all images in one row with a mask per image.
    patch = height_and_width(model.config.patch_size)
    rows, columns = (s // p for s, p in zip(height_and_width(model.config.image_size), patch, strict=True))
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(hidden.device)
    places = model.patch_positional_embedding(hidden, grid)
    return model.transformer(hidden, attention_mask=None, position_embeddings=places).last_hidden_state


ADAPTERS: Mapping[str, Adapter] = {
    "whisper": Adapter(_resume_whisper),
    "idefics3_vision": Adapter(_resume_idefics),
    "smolvlm_vision": Adapter(_resume_idefics),
    "dinov3_vit": Adapter(_resume_dinov3),
    "pixtral": Adapter(_resume_pixtral, _embed_pixtral),
}
