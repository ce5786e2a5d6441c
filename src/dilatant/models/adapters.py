"""Adapters: what a family of encoders needs because its forward does more than embed, run blocks and normalise.

A slice without its embedding is normally run by the family's own forward, which is given hidden states in the place
of its input. Where the forward works on its input inline (checks its length, convolves it), that cannot be; then
`resume` runs the slice from hidden states, by calling the model's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Adapter:
    """resume(slice, hidden) → hidden: runs a slice that begins after the embedding; [rows, tokens, width] both."""

    resume: Callable[[nn.Module, Tensor], Tensor]


def _resume_whisper(model: Any, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        # Whisper's encoder may leave out layers while it trains (LayerDrop).
        if not (model.training and model.layerdrop > 0 and torch.rand([]) < model.layerdrop):
            hidden = layer(hidden, None)
    return model.layer_norm(hidden)


def _resume_idefics(model: Any, hidden: Tensor) -> Tensor:
    # Its forward makes a mask of patches from the size of the pixels, all of them seen.
    return model.post_layernorm(model.encoder(inputs_embeds=hidden).last_hidden_state)


ADAPTERS: Mapping[str, Adapter] = {
    "whisper": Adapter(_resume_whisper),
    "idefics3_vision": Adapter(_resume_idefics),
    "smolvlm_vision": Adapter(_resume_idefics),
}
