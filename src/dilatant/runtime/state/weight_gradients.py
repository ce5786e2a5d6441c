"""Split backward (zero bubble): linear layers, expert layers included, whose weight gradients can be delayed.

`I` is an ordinary backward pass inside `WeightGradients.deferring`: a linear layer computes its input gradient and only
records what its weight gradient needs. `W` computes the recorded weight gradients. All other weights (norms,
embeddings, convolutions, routers) get their gradients in `I`, since they are cheap; so do layers listed by the stage
(see `Stage.undeferred`).

Weight gradients below fp32 are accumulated here in fp32, product by product: autograd would first round every product
to the weight's dtype.

torch.distributed.pipelining instead walks the graph twice, which recomputes a checkpointed block many times and loses
gradients behind frozen stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.core.parallel_linear import ParallelLinear
from dilatant.models.experts.grouped_experts import (
    add_grouped_products,
    group_experts,
    grouped_linear,
    has_kernel,
    is_fused,
    ungroup_experts,
)
from dilatant.runtime.state.fp8_products import Multiply
from dilatant.runtime.state.linear_operators import handle_of
from dilatant.runtime.state.linear_operators import linear as operator

_PIECE = 1 << 24
"""Elements of a weight gradient that are computed at once, if it is computed and accumulated in different dtypes."""

DelayedGradient = tuple[nn.Parameter | None, nn.Parameter | None, Tensor, Tensor, Sequence[int] | None]
"""A delayed weight gradient: weight and bias (None if frozen), the inputs [rows, in_features], the output gradient
[rows, out_features] and, for experts, the number of rows of each expert."""


class WeightGradients:
    """The delayed weight gradients of one stage. Enter `deferring` around a backward to delay them.

    splits: the backward of the current forward may be split into I and W. If False, most fp32 linear layers run as
    plain layers, which is cheaper.
    """

    def __init__(self) -> None:
        self.splits = True
        self.is_deferring = False
        self.deferred: list[DelayedGradient] = []

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Record weight gradients in backward passes inside instead of computing them."""
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def take(self) -> list[DelayedGradient]:
        """Return the weight gradients recorded since the last call, in backward order; for `accumulate`."""
        deferred, self.deferred = self.deferred, []
        return deferred


@torch.no_grad()
def accumulate(
    deferred: list[DelayedGradient], reached: Callable[[nn.Parameter | None], None] = lambda weight: None
) -> None:
    """Add delayed weight gradients to `grad`, freeing their inputs one by one. reached: called with each layer's weight
    before."""
    deferred.reverse()
    while deferred:
        weight, bias, inputs, gradient, counts = deferred.pop()
        reached(weight if bias is None else bias)
        if weight is not None and counts is not None:
            _add_products(weight, gradient, inputs, counts)
        elif weight is not None:
            _add_product(weight, gradient, inputs)
        if bias is not None:
            _add(bias, gradient.sum(dim=0, dtype=_gradient_dtype(bias)))


class DeferredLinear(ParallelLinear):
    """A linear layer that shares the weights of `linear` and can delay their gradients. multiply: computes its output,
    and its input gradient with the transposed weight; anything but `functional.linear` is called without autograd."""

    def __init__(
        self, linear: nn.Linear, gradients: WeightGradients, defers: bool = True, multiply: Multiply = functional.linear
    ) -> None:
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.training = linear.training
        self.gradients = gradients
        self.defers = defers
        self.multiply = multiply
        self.handle = handle_of(self)
        self.enter = linear.enter if isinstance(linear, ParallelLinear) else None
        self.leave = linear.leave if isinstance(linear, ParallelLinear) else None

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        weight, defers = self.weight, self.defers  # each look-up of a parameter is a Python call
        bias_trains, is_own = bias is not None and bias.requires_grad, self.multiply is not functional.linear
        trains = weight.requires_grad or bias_trains or (is_own and input.requires_grad)
        trains = trains and torch.is_grad_enabled()
        if (trains or is_own) and torch.compiler.is_compiling():
            return operator(input, weight, bias, self.handle, is_own)
        if trains and (self.gradients.splits or not defers or is_own or _adds_itself(weight)):
            output: Tensor = _DeferredProduct.apply(input, weight, bias, self)
            with torch.no_grad():
                output.data = self.multiply(input, weight, bias)
            return output
        return self.multiply(input, weight, bias)

    @torch.no_grad()
    def add_gradient(self, gradient: Tensor, inputs: Tensor) -> None:
        """Add the gradients of weight and bias, as far as they train, or delay them: the backward of compiled blocks.
        gradient, inputs: [rows, features]."""
        weight = cast(nn.Parameter, self.weight) if self.weight.requires_grad else None
        bias = self.bias if self.bias is not None and self.bias.requires_grad else None
        delayed: list[DelayedGradient] = [(weight, bias, inputs.detach(), gradient.detach(), None)]
        if self.gradients.is_deferring and self.defers:
            self.gradients.deferred += delayed
        else:
            accumulate(delayed)


@dataclass(frozen=True, slots=True)
class ReplacedLayers:
    """The layers that `replace_linears` replaced in a stage. linears: (parent, attribute name, original layer).
    experts: modules with a replaced computation."""

    linears: tuple[tuple[nn.Module, str, nn.Linear], ...]
    experts: tuple[nn.Module, ...]


def replace_linears(
    stage: nn.Module,
    gradients: WeightGradients,
    undeferred: Collection[nn.Module] = (),
    products: Mapping[nn.Module, Multiply] = MappingProxyType({}),
) -> ReplacedLayers:
    """Replace every plain linear layer by a DeferredLinear, and make fused experts delay their gradients, too; returns
    the argument of `restore_linears`.

    undeferred: linear layers whose gradients are not delayed. products: those that multiply in their own way.

    A layer that is registered in several places becomes one layer in all of them. Only an `nn.Linear` or
    `ParallelLinear` without hooks is replaced; subclasses may compute something else, and get their gradients in `I`.
    """
    places = tuple(
        (parent, name, child)
        for parent in stage.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and type(child) in (nn.Linear, ParallelLinear) and not _has_hooks(child)
    )
    # `named_children` skips a module's second name in one parent; such layers are rare, and are simply not delayed.
    made: dict[int, DeferredLinear] = {}
    for parent, name, child in places:
        parent._modules[name] = made.setdefault(
            id(child), DeferredLinear(child, gradients, child not in undeferred, products.get(child, functional.linear))
        )

    def product(rows: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        if torch.is_grad_enabled() and weight.requires_grad:
            return _GroupedLinear.apply(rows, weight, tuple(counts), gradients)
        return grouped_linear(rows, weight, counts)

    experts = tuple(module for module in stage.modules() if is_fused(module))
    for module in experts:
        group_experts(module).product = product
    return ReplacedLayers(places, experts)


def restore_linears(replaced: ReplacedLayers) -> None:
    """Undo `replace_linears`; weights that were meanwhile loaded, frozen or moved are kept."""
    for parent, name, linear in replaced.linears:
        current = parent._modules[name]
        assert isinstance(current, DeferredLinear)
        linear.weight, linear.bias = current.weight, current.bias
        linear.training = current.training
        parent._modules[name] = linear
    for module in replaced.experts:
        ungroup_experts(module)


class _DeferredProduct(torch.autograd.Function):
    """Saves the input, and has an output without values: the caller multiplies afterwards, because a recomputation ends
    when the last tensor is saved, which torch does after `forward`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: DeferredLinear
    ) -> Tensor:
        ctx.save_for_backward(input if any(ctx.needs_input_grad[1:]) else None)
        # The Parameter itself: a saved tensor is a copy after a checkpoint's recomputation, and its gradient
        # would be lost.
        ctx.weight, ctx.bias, ctx.layer = weight, bias, layer
        shape = *input.shape[:-1], len(weight)
        return input.new_empty_strided(shape, (0,) * len(shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (inputs,) = ctx.saved_tensors
        weight, bias, layer = ctx.weight, ctx.bias, ctx.layer
        is_wanted, trains, bias_trains, _ = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        flat = gradient.flatten(0, -2)
        if is_wanted:
            grad_input = layer.multiply(flat, weight.t(), None).view(*gradient.shape[:-1], weight.shape[1])
        if not (trains or bias_trains):
            return grad_input, None, None, None
        rows = inputs.flatten(0, -2)
        if layer.gradients.is_deferring and layer.defers:
            left = weight if trains else None, bias if bias_trains else None
            layer.gradients.deferred.append((*left, rows.detach(), flat.detach(), None))
            return grad_input, None, None, None
        if trains and (not layer.defers or _adds_itself(weight)):
            # In place, since gradients of row chunks and microbatches add up; accumulation hooks still run.
            _add_product(weight, flat, rows)
        elif trains:
            grad_weight = flat.t() @ rows
        if bias_trains:
            grad_bias = flat.sum(dim=0, dtype=_gradient_dtype(bias))
        return grad_input, grad_weight, grad_bias, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, counts: tuple[int, ...], gradients: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.counts, ctx.gradients = (weight, counts, gradients)  # the Parameter: see `_DeferredProduct`
        return grouped_linear(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (rows,) = ctx.saved_tensors
        weight, counts = ctx.weight, ctx.counts
        if ctx.gradients.is_deferring:
            ctx.gradients.deferred.append((weight, None, rows.detach(), gradient.detach(), counts))
        else:
            _add_products(weight, gradient, rows, counts)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return grouped_linear(gradient, weight.transpose(1, 2), counts), None, None, None


def _add_product(weight: nn.Parameter, gradient: Tensor, inputs: Tensor) -> None:
    """Add `gradient.t() @ inputs` to the gradient of `weight`, in the gradient's dtype and with little memory."""
    dtype = _gradient_dtype(weight)
    if dtype == inputs.dtype and weight.grad is None:
        weight.grad = gradient.t() @ inputs
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=dtype)
    adder_of(weight.device.type, dtype == inputs.dtype)(weight.grad, gradient, inputs)


def _add_products(weight: nn.Parameter, gradient: Tensor, inputs: Tensor, counts: Sequence[int]) -> None:
    """Add each expert's product to its matrix of `weight` [experts, out, in]. Where torch has a kernel for all experts,
    it rounds each product to bf16 before it is added; elsewhere they are added one by one, as `_add_product` does."""
    dtype = _gradient_dtype(weight)
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=dtype)
    if has_kernel(inputs, weight):
        add_grouped_products(weight.grad, gradient, inputs, counts)
        return
    add, sizes = adder_of(weight.device.type, dtype == inputs.dtype), list(counts)
    for total, out, into in zip(weight.grad, gradient.split(sizes), inputs.split(sizes), strict=True):
        if len(into):
            add(total, out, into)


def adder_of(device: str, is_alike: bool) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return what adds `gradient.t() @ inputs` to `total` [out, in] on this type of device, given total, gradient
    [rows, out] and inputs [rows, in]. is_alike: all have one dtype."""
    return add_in_product if device == "cuda" and not is_alike else add_in_pieces


def add_in_product(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Add a product of 16-bit factors inside its fp32 matrix product: one kernel without a temporary (CUDA only)."""
    torch.addmm(total, gradient.t(), inputs, out_dtype=total.dtype, out=total)


def add_in_pieces(total: Tensor, gradient: Tensor, inputs: Tensor) -> None:
    """Add a product of factors of the total's dtype or narrower ones, which are widened with little memory."""
    wide, factor = inputs.to(total.dtype), gradient.t()
    rows = max(1, _PIECE // total.shape[1])
    is_whole = wide is inputs or len(total) <= rows
    for piece, part in [(total, factor)] if is_whole else zip(total.split(rows), factor.split(rows)):
        piece.addmm_(part.to(total.dtype), wide)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    return parameter.grad_dtype or parameter.dtype


def _adds_itself(weight: Tensor) -> bool:
    """Return True if gradients of `weight` have a wider dtype than autograd would return."""
    return _gradient_dtype(weight) != weight.dtype


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
