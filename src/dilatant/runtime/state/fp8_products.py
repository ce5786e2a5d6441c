"""FP8 linear layers: products of two matrices in eight bits (E4M3) whose rows each have a scale.

Scales are powers of two, which move exponents only. A number is so rounded alike whatever else is in its row, unless it
is below 2**-13 of the largest there: neither packing nor tensor-parallel shards change what is multiplied. Forward and
input gradient are products in eight bits; weight gradients have the operands of bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.core.stage import Stage

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function like `functional.linear`."""
Scaled = tuple[Tensor, Tensor]
"""A matrix in E4M3, contiguous, and the fp32 scales of its rows, [rows, 1]."""

_E4M3 = torch.float8_e4m3fn
_EXPONENT = 0x7F800000
"""The bits of an fp32 number's exponent: the largest power of two in it."""
_LARGEST = 128.0
"""Rows are scaled to a largest number from this to twice this; E4M3 ends at 448."""
_SMALLEST = 2.0**-100


def quantize(matrix: Tensor) -> Scaled:
    """Round a matrix [rows, columns] to E4M3. Rows with a number that is not finite become NaN in every product."""
    largest = torch.linalg.vector_norm(matrix, math.inf, dim=1, keepdim=True).float()
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_min(_SMALLEST)
    rounded = torch.empty(matrix.shape, dtype=_E4M3, device=matrix.device)
    torch.mul(matrix, (_LARGEST / power).to(matrix.dtype), out=rounded)
    return rounded, power / _LARGEST


def fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `functional.linear` with both factors in eight bits; without autograd."""
    rows = input.flatten(0, -2)
    if not len(rows):
        return functional.linear(input, weight, bias)
    multiply = multiply_scaled if input.is_cuda else multiply_emulated
    product = multiply(quantize(rows), quantize(weight), bias, input.dtype)
    return product.view(*input.shape[:-1], len(weight))


def multiply_scaled(rows: Scaled, weight: Scaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply by the kernel of FP8 hardware."""
    by_row = functional.ScalingType.RowWise
    return functional.scaled_mm(
        rows[0], weight[0].t(), rows[1], by_row, weight[1].t(), by_row, bias=bias, output_dtype=dtype
    )


def multiply_emulated(rows: Scaled, weight: Scaled, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply the same rounded numbers, which `dtype` holds exactly."""
    left, right = (values.to(dtype) * scales.to(dtype) for values, scales in (rows, weight))
    return functional.linear(left, right, bias)


def fp8_products(stage: Stage, names: Set[str]) -> Mapping[nn.Module, Multiply]:
    """Return how those linear layers of a stage multiply whose weights have these logical names: in FP8."""
    weights = {id(weight) for name, weight in stage.named_logical_parameters() if name in names}
    layers = (layer for layer in stage.modules() if isinstance(layer, nn.Linear))
    return {layer: fp8_linear for layer in layers if id(layer.weight) in weights}
