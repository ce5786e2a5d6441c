"""Linear layers with a part of their weight, plain or in four bits, at whose ends tensor-parallel ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional

from dilatant.models.adapters.four_bit import FourBitLinear, four_bit_linear
from dilatant.models.core.sequence_parallel import Product


class _Parallel:
    """Mixed into the class of a linear layer.

    enter: takes its inputs in. leave(inputs, product): takes its products out, before the bias is added. made: inputs
    that it will be given next, and what it makes of them, where that has been computed by now.
    """

    enter: Callable[[Tensor], Tensor] | None = None
    leave: Callable[[Tensor, Product], Tensor] | None = None
    made: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        made, self.made = self.made, None
        if made is not None and made[0] is input:
            return made[1]
        input = input if self.enter is None else self.enter(input)
        bias: Tensor | None = cast(Any, self).bias
        if self.leave is None:
            return self.product(input, bias)
        output = self.leave(input, partial(self.product, bias=None))
        return output if bias is None else output + bias

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Of inputs and weight, plus the bias if it is given."""
        raise NotImplementedError


class ParallelLinear(_Parallel, nn.Linear):
    """One with a plain weight."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, self.weight, bias)


class ParallelFourBit(_Parallel, FourBitLinear):
    """One in four bits, in the place of `linear`."""

    def __init__(self, linear: ParallelLinear, weight: Tensor) -> None:
        super().__init__(linear, weight)
        self.enter, self.leave = linear.enter, linear.leave

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return four_bit_linear(input, self, bias)
