"""A kernel set that runs on a CPU in place of a GPU library's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dilatant.models.core.fused_modules import FusedSwiglu, KernelSet, rotating


class FusedNorm(nn.Module):
    """A norm over torch's own functions, with the weights of `norm`."""

    def __init__(self, norm: Any, offset: float = 0.0) -> None:
        super().__init__()
        self._parameters.update(norm._parameters)
        self.eps, self.offset = getattr(norm, "variance_epsilon", None) or norm.eps, offset

    def forward(self, hidden: Tensor) -> Tensor:
        weight, width = self.weight, hidden.shape[-1:]
        if (bias := self._parameters.get("bias")) is not None:
            return nn.functional.layer_norm(hidden, width, weight, bias, self.eps)
        return nn.functional.rms_norm(hidden.float(), width, weight.float() + self.offset, self.eps).to(hidden.dtype)


class _GatedProduct(torch.autograd.Function):
    """silu(gate) * up, whose backward writes into what its forward saved, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid, saved = torch.sigmoid(gate), gate.clone()
        gate.data.copy_(gradient * up * sigmoid * (1 + saved * (1 - sigmoid)))
        up.data.copy_(gradient * saved * sigmoid)
        return gate, up


class Rotation(torch.autograd.Function):
    """Rotary embedding that writes into its inputs and, in the backward, into their gradients, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(query, cos, sin), _turned(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(_turned(each, cos, -sin) for each in gradients), None, None


def _turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = rows.chunk(2, -1)
    one, other = (part.chunk(2, -1)[0].unsqueeze(1) for part in (cos, sin))
    low, high = low * one - high * other, high * one + low * other
    return rows.data.copy_(torch.cat([low, high], -1))


def stand_ins() -> KernelSet:
    return {
        "rms_norm": (FusedNorm, lambda norm: FusedNorm(norm, 1.0)),
        "layer_norm": (FusedNorm,),
        "swiglu": (lambda mlp: FusedSwiglu(mlp, _GatedProduct.apply),),
        "rope": (lambda attention: rotating(attention, Rotation.apply),),
    }
