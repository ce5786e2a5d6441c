"""Four-bit linear layers: frozen weights in NF4 (QLoRA, Dettmers et al. 2023), by bitsandbytes.

Scales stay in fp32, so that quantising a dequantised weight reproduces its bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64
"""Number of weight elements that share one scale."""
KIND = "nf4"


class FourBitLinear(nn.Module):
    """Frozen linear layer with a four-bit weight: replaces `linear`, with `weight` quantised on the weight's device."""

    packed: Tensor
    scales: Tensor
    code: Tensor

    def __init__(self, linear: nn.Linear, weight: Tensor) -> None:
        from bitsandbytes.functional import quantize_4bit

        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # As one row: bitsandbytes' CPU kernel (0.50) uses wrong scales if rows are not whole blocks.
        packed, state = quantize_4bit(weight.reshape(1, -1), blocksize=BLOCK, quant_type=KIND)
        for name, tensor in (("packed", packed), ("scales", state.absmax), ("code", state.code)):
            self.register_buffer(name, tensor, persistent=False)
        self.dtype = weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, computed at each access: [out, in], in the original dtype."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        row = torch.Size((1, self.out_features * self.in_features))
        state = QuantState(self.scales, row, self.code, BLOCK, KIND, self.dtype)
        return dequantize_4bit(self.packed, state).view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        return four_bit_linear(input, self, self.bias)


def four_bit_linear(input: Tensor, layer: FourBitLinear, bias: Tensor | None) -> Tensor:
    """Multiply the input by the layer's weight, and add a frozen bias."""
    return _FourBitProduct.apply(input, layer, bias)


class _FourBitProduct(torch.autograd.Function):
    """Linear product that saves no tensor: backward dequantises the weight a second time."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: FourBitLinear, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return functional.linear(input, layer.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.layer.weight, None, None


def is_four_bit(module: nn.Module, key: str) -> bool:
    """Return True if the weight under `key` is a four-bit weight, which is no parameter or buffer of `module`."""
    path, _, last = key.rpartition(".")
    return last == "weight" and isinstance(module.get_submodule(path), FourBitLinear)
