"""Four-bit weights of stages: selection of the weights, and their quantisation at load time.

Four-bit weights are not saved in checkpoints; a rank that joins later reads them from the model's source.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.config.errors import UserError
from dilatant.models.adapters.four_bit import FourBitLinear
from dilatant.models.core.parallel_linear import ParallelFourBit, ParallelLinear
from dilatant.models.core.stage import Stage
from dilatant.models.core.unit import Unit


def require_four_bit() -> None:
    """Raise UserError if bitsandbytes is not installed, without importing it."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.lora.load_in_4bit needs bitsandbytes, which is not installed; `pip install 'dilatant[bnb]'`, or "
            "leave the key out"
        )


def four_bit_names(unit: Unit) -> frozenset[str]:
    """Return the logical names of the weights that a unit holds in four bits: frozen linear layers of its blocks."""
    if unit.structure is None:
        return frozenset()
    names = {weight.key: weight.canonical for weight in unit.weights if weight.part == "model"}
    return frozenset(
        names[f"{path}.weight"]
        for path, module in unit.model.named_modules()
        if path.startswith(unit.structure.blocks + ".")
        and type(module) is nn.Linear
        and not any(parameter.requires_grad for parameter in module.parameters())
        and names.get(f"{path}.weight") not in unit.tied.values()
    )


@torch.no_grad()
def quantize(
    stage: Stage, names: Set[str], device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Quantise a stage's weights with logical `names` to four bits on `device`, one by one, from the stage's own values
    or from `weights`. Raises UserError for a weight of another shape."""
    for weight in stage.weights:
        if weight.part != "model" or weight.canonical not in names:
            continue
        model: Any = stage.model
        parent, _, last = weight.key.removesuffix(".weight").rpartition(".")
        linear = model.get_submodule(parent)._modules[last]
        given = (weights or {}).get(weight.canonical, linear.weight)
        require_shape(weight.canonical, given, linear.weight)
        own = given.to(device, linear.weight.dtype)
        made = ParallelFourBit if isinstance(linear, ParallelLinear) else FourBitLinear
        model.get_submodule(parent)._modules[last] = made(linear, own)


def drop_four_bit(unit: Unit) -> None:
    """Replace the unit's four-bit layers by plain linear layers on the meta device."""
    for parent in list(unit.model.modules()):
        for last, layer in parent.named_children():
            if isinstance(layer, FourBitLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(plain.weight.to(layer.dtype), requires_grad=False)
                plain.bias = layer.bias
                setattr(parent, last, plain)


def require_shape(name: str, given: Tensor, own: Tensor) -> None:
    """Raise UserError if the shapes differ, because a copy could broadcast silently."""
    if given.shape != own.shape:
        raise UserError(
            f"weight {name!r} has shape {list(given.shape)} where it is read, and {list(own.shape)} in the model"
        )
