"""What only a forward can tell about a family, asked of its skeleton: on the meta device, so nothing is computed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from dilatant.config.errors import UserError
from dilatant.models.geometry import encoder_geometry, height_and_width


def count_leading_tokens(config: Any) -> int:
    """Tokens an image encoder returns for one image beyond its patches. Raises UserError if it cannot be told."""
    height, width = height_and_width(config.image_size)
    patch_height, patch_width = height_and_width(config.patch_size)
    try:
        with torch.device("meta"), torch.no_grad():
            tokens = AutoModel.from_config(config)(**_one_row(config)).last_hidden_state.shape[1]
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model_type {config.model_type!r} cannot be used as an image encoder: {reason}"
        ) from None
    leading = tokens - (height // patch_height) * (width // patch_width)
    if leading < 0:
        raise UserError(
            f"model_type {config.model_type!r} returns {tokens} tokens for {height}x{width} pixels, fewer than it has "
            "patches; such an encoder is not supported"
        )
    return leading


def unused_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of an encoder's parameters that its last hidden state does not depend on (pooling heads, mask tokens).

    Empty for a family whose forward does not run on the meta device.
    """
    try:
        with torch.device("meta"), torch.enable_grad():
            skeleton = type(model)(copy.deepcopy(model.config))
            skeleton.set_attn_implementation("eager")  # a kernel need not know the meta device
            hidden = skeleton(**_one_row(model.config)).last_hidden_state
    except Exception:
        return frozenset()
    reached = _leaves(hidden)
    return frozenset(
        name
        for name, parameter in skeleton.named_parameters()
        if parameter.requires_grad and id(parameter) not in reached
    )


def _leaves(output: Tensor) -> set[int]:
    """Identities of the leaf tensors that a tensor was computed from."""
    leaves: set[int] = set()
    seen: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [function for function, _ in node.next_functions]
    return leaves


def _one_row(config: Any) -> dict[str, Tensor]:
    if getattr(config, "num_mel_bins", None) is not None:
        geometry = encoder_geometry(config)
        return {geometry.input_name: torch.empty(1, *geometry.row_shape)}
    height, width = height_and_width(config.image_size)
    return {"pixel_values": torch.empty(1, int(getattr(config, "num_channels", 3)), height, width)}
