"""Frozen linear layers whose weights are held in four bits (NF4 of QLoRA, Dettmers et al. 2023), by bitsandbytes.

Whoever holds a layer quantises it when its weights are read. What is held so is no state: checkpoints lack it, and
whoever comes later reads it from where the model came from. Scales stay in fp32, so that a weight that was quantised
gives the same bits when it is quantised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.config.errors import UserError

if TYPE_CHECKING:
    from dilatant.models.stage import Stage
    from dilatant.models.unit import Unit

BLOCK = 64
"""Numbers of a weight that have one scale."""
KIND = "nf4"


def require_four_bit() -> None:
    """Raises UserError where bitsandbytes is not installed; imports nothing."""
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.lora.load_in_4bit needs bitsandbytes, which is not installed; `pip install 'dilatant[bnb]'`, or "
            "leave the key out"
        )


def four_bit_names(unit: Unit) -> frozenset[str]:
    """Logical names of the weights that a unit holds in four bits: of linear layers in its blocks of which nothing
    trains."""
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


class FourBitLinear(nn.Module):
    """A linear layer with `weight` in the place of its own, frozen, on the weight's device."""

    packed: Tensor
    scales: Tensor
    code: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # As one row: bitsandbytes' kernel for CPUs (0.50) takes wrong scales where rows are no whole blocks.
        packed, state = quantize_4bit(weight.reshape(1, -1), blocksize=BLOCK, quant_type=KIND)
        for name, tensor in (("packed", packed), ("scales", state.absmax), ("code", state.code)):
            self.register_buffer(name, tensor, persistent=False)
        self.dtype = weight.dtype

    @property
    def weight(self) -> Tensor:
        """What it computes with, made anew at each call: [out, in], in the dtype that the weight had."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        row = torch.Size((1, self.out_features * self.in_features))
        state = QuantState(self.scales, row, self.code, BLOCK, KIND, self.dtype)
        return dequantize_4bit(self.packed, state).view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        return _Linear.apply(input, self)


class _Linear(torch.autograd.Function):
    """Keeps nothing: the weight is made again in the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(input, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight, None


@torch.no_grad()
def quantize(
    stage: Stage, names: Set[str], device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Hold those of a stage's weights with logical `names` in four bits on `device`, one by one: the stage's own, or
    those of `weights`. Raises UserError for one of another shape."""
    for weight in stage.weights:
        if weight.part != "model" or weight.canonical not in names:
            continue
        model: Any = stage.model
        parent, _, last = weight.key.removesuffix(".weight").rpartition(".")
        linear = model.get_submodule(parent)._modules[last]
        given = (weights or {}).get(weight.canonical, linear.weight)
        require_shape(weight.canonical, given, linear.weight)
        own = given.to(device, linear.weight.dtype)
        model.get_submodule(parent)._modules[last] = FourBitLinear(linear, own)


def forget(unit: Unit) -> None:
    """Have plain layers without memory in the place of those that a unit holds in four bits."""
    for parent in list(unit.model.modules()):
        for last, layer in parent.named_children():
            if isinstance(layer, FourBitLinear):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(plain.weight.to(layer.dtype), requires_grad=False)
                plain.bias = layer.bias
                setattr(parent, last, plain)


def require_shape(name: str, given: Tensor, own: Tensor) -> None:
    """Raises UserError: a copy would broadcast some."""
    if given.shape != own.shape:
        raise UserError(
            f"weight {name!r} has shape {list(given.shape)} where it is read, and {list(own.shape)} in the model"
        )


def is_four_bit(module: nn.Module, key: str) -> bool:
    """Whether the weight of this key is held in four bits, and so is no tensor of the module."""
    path, _, last = key.rpartition(".")
    return last == "weight" and isinstance(module.get_submodule(path), FourBitLinear)
