"""Tensor-parallel linear layers, plain or four-bit: a weight shard, with communication before and after the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.adapters.four_bit import FourBitLinear, four_bit_linear
from dilatant.models.core.sequence_parallel import TokenProduct


class _Parallel:
    """Mixin for the class of a linear layer.

    enter: applied to the input (e.g. an all-gather). leave(input, product): computes and reduces the output before the
    bias is added. precomputed: the next input and its output, if it was computed in advance (see
    `gather_products`).
    """

    enter: Callable[[Tensor], Tensor] | None = None
    leave: Callable[[Tensor, TokenProduct], Tensor] | None = None
    precomputed: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.precomputed is not None:
            (known, output), self.precomputed = self.precomputed, None
            if known is input:
                return output
        input = input if self.enter is None else self.enter(input)
        bias: Tensor | None = cast(Any, self).bias
        if self.leave is None:
            return self.product(input, bias)
        output = self.leave(input, partial(self.product, bias=None))
        return output if bias is None else output + bias

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the input by the weight, and add the bias if there is one."""
        raise NotImplementedError


class ParallelLinear(_Parallel, nn.Linear):
    """A tensor-parallel linear layer with a plain weight."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, self.weight, bias)


class ParallelFourBit(_Parallel, FourBitLinear):
    """A tensor-parallel linear layer with a four-bit weight; replaces `linear`."""

    def __init__(self, linear: ParallelLinear, weight: Tensor) -> None:
        super().__init__(linear, weight)
        self.enter, self.leave = linear.enter, linear.leave

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return four_bit_linear(input, self, bias)
