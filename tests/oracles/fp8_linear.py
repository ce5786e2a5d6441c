"""Linear layers in FP8 by arithmetic on fp64 numbers: rows of both factors rounded to E4M3, and a plain product."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BITS = 3
"""Of E4M3 behind the leading one."""
LEAST = -6
"""Exponent of the smallest number of E4M3 with a leading one."""


def rounded(matrix: Tensor) -> Tensor:
    """Round a matrix [rows, columns] to numbers of E4M3 times a power of two for each row, which makes its largest
    number one of 128 to 256."""
    rows = matrix.detach().double()
    largest = torch.frexp(rows.abs().amax(dim=1, keepdim=True)).exponent  # frexp: 0.5 <= mantissa < 1
    unit = 2.0 ** (largest - 8).double()
    exponent = (torch.frexp(rows / unit).exponent - 1).clamp_min(LEAST)
    step = unit * 2.0 ** (exponent - BITS).double()
    return (torch.round(rows / step) * step).to(matrix.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        product = rounded(rows) @ rounded(weight).t()
        return product if bias is None else product + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, weight = ctx.saved_tensors
        into = rounded(gradient) @ rounded(weight.t()).t()
        return into, gradient.t() @ rows, gradient.sum(dim=0) if ctx.needs_input_grad[2] else None


def rounded_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `functional.linear` computes of rounded factors; the weight gradient is that of the factors as they are."""
    rows = _Product.apply(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], len(weight))


def round_linears(model: nn.Module) -> None:
    """Make the linear layers of a model's blocks multiply so; adapters, and sizes that 16 does not divide, do not."""
    for path, layer in model.named_modules():
        is_wide = isinstance(layer, nn.Linear) and not any(size % 16 for size in layer.weight.shape)
        if is_wide and re.search(r"(^|\.)layers\.\d+\.", path) and "lora_" not in path:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: Any, input: Tensor) -> Tensor:
    return rounded_linear(input, layer.weight, layer.bias)
