"""Linear layers as operators of torch, so that torch.compile treats product and weight gradient as opaque calls.

A compiled block calls `dilatant::linear`. Its backward computes the input gradient and calls
`dilatant::weight_gradient`, which at run time hands the operands to the layer: the layer adds the product in fp32 or
delays it, as it does in eager mode. Operators take tensors only, so a layer is named by a number in a tensor; a tensor
itself would lose its identity, since checkpoints and graphs pass copies.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional


class TakesGradient(Protocol):
    """A linear layer that computes its own weight gradient."""

    def add_gradient(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add, or delay, the weight gradient of outputs with this `gradient`; both operands may be kept."""


_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Operators are registered once for the process, so the layers that they find by number are, too."""


def handle_of(layer: TakesGradient) -> Tensor:
    """Return a new handle of `layer` for `linear`: float64, a scalar on the CPU; it does not keep the layer alive. It
    requires a gradient, which is always 0: a graph would leave out a call whose result nobody takes."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)


@torch.library.custom_op("dilatant::linear", mutates_args=())
def linear(input: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor) -> Tensor:
    """Compute `functional.linear`; in backward the layer of `handle` gets the weight's and the bias's gradient."""
    return functional.linear(input, weight, bias)


@linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor) -> Tensor:
    torch._check(input.shape[-1] == weight.shape[1])  # the width is a constant of the graph
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op("dilatant::weight_gradient", mutates_args=())
def weight_gradient(handle: Tensor, gradient: Tensor, inputs: Tensor) -> Tensor:
    """Give the layer of `handle` the operands of its weight gradient, [..., out_features] and [..., in_features];
    return the handle's gradient."""
    _LAYERS[int(handle)].add_gradient(gradient.flatten(0, -2), inputs.flatten(0, -2))
    return torch.zeros_like(handle)


@weight_gradient.register_fake
def _(handle: Tensor, gradient: Tensor, inputs: Tensor) -> Tensor:
    return torch.empty_like(handle)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, handle = inputs
    ctx.save_for_backward(input, weight, handle)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor]:
    input, weight, handle = ctx.saved_tensors
    called = weight_gradient(handle, gradient, input)
    return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, called


linear.register_autograd(_backward, setup_context=_setup)
