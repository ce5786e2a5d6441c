"""Model-family properties that only a forward shows, found by running the model on the meta device.

The meta device computes nothing, but some families draw a random number per block, so torch's generator is restored.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from dilatant.config.errors import UserError, one_line


@torch.random.fork_rng(devices=[])
def count_tokens(config: Any, input_name: str, row_shape: tuple[int, ...]) -> int:
    """Count the tokens that an encoder outputs for one row of `row_shape`. Raises UserError if its forward fails."""
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
            row = torch.empty(1, *row_shape)
        with torch.no_grad():  # some count patches with tensors of the default device, which need values
            return model(**{input_name: row}).last_hidden_state.shape[1]
    except Exception as error:
        raise UserError(
            f"model_type {config.model_type!r} cannot be used as an image encoder: {one_line(error, 200)}"
        ) from None


@torch.random.fork_rng(devices=[])
def unused_parameters(model: PreTrainedModel, input_name: str, row_shape: tuple[int, ...]) -> frozenset[str]:
    """Return the names of parameters that an encoder's last hidden state does not depend on (pooling heads, mask
    tokens).

    Empty for a family whose forward does not run on the meta device.
    """
    try:
        with torch.device("meta"):
            skeleton = type(model)(copy.deepcopy(model.config))
            skeleton.set_attn_implementation("eager")  # kernels may not support the meta device
            row = torch.empty(1, *row_shape)
        with torch.enable_grad():
            hidden = skeleton(**{input_name: row}).last_hidden_state
    except Exception:
        return frozenset()
    reached = _leaves(hidden)
    return frozenset(
        name
        for name, parameter in skeleton.named_parameters()
        if parameter.requires_grad and id(parameter) not in reached
    )


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the leaf tensors from which a tensor was computed."""
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
