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


class Layer(Protocol):
    """A linear layer that multiplies and computes its own weight gradient."""

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
        """Compute what `functional.linear` does, in the layer's own precision, without autograd."""

    def add_gradient(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add, or delay, the weight gradient of outputs with this `gradient`; both operands may be kept."""


_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""Operators are registered once for the process, so the layers that they find by number are, too."""


def handle_of(layer: Layer) -> Tensor:
    """Return a new handle of `layer` for `linear`: float64, a scalar on the CPU; it does not keep the layer alive. It
    requires a gradient, which is always 0: a graph would leave out a call whose result nobody takes."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return torch.tensor(float(number), dtype=torch.float64, device="cpu", requires_grad=True)


@torch.library.custom_op("dilatant::linear", mutates_args=())
def linear(input: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, is_own: bool) -> Tensor:
    """Compute `functional.linear`; in backward the layer of `handle` gets the weight's and the bias's gradient. is_own:
    this product and the input gradient's are the layer's own `multiply`."""
    return (_LAYERS[int(handle)].multiply if is_own else functional.linear)(input, weight, bias)


@linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor, is_own: bool) -> Tensor:
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
    input, weight, _, handle, ctx.is_own = inputs
    ctx.save_for_backward(input, weight, handle)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    input, weight, handle = ctx.saved_tensors
    is_wanted, *trains = ctx.needs_input_grad[:3]
    called = weight_gradient(handle, gradient, input) if any(trains) else None  # else the graph keeps no input
    into = None
    if is_wanted:
        into = linear(gradient, weight.t(), None, handle, True) if ctx.is_own else gradient @ weight
    return into, None, None, called, None


linear.register_autograd(_backward, setup_context=_setup)
