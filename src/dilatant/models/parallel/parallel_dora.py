"""DoRA (Liu et al. 2024) on a tensor-parallel linear layer.

The norm of a row of the adapted weight covers all columns: a rank that holds some columns needs the sum of squares over
all ranks. Backward treats the norm as a constant, as in peft (DoRA, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.attention.recompute_cache import cached_exchange
from dilatant.models.adapters.lora import ADAPTER

Sum = Callable[[Tensor], Tensor]


def shard_magnitudes(layer: nn.Module, sum_of_ranks: Sum | None = None) -> None:
    """Make a peft layer compute norms over whole rows. sum_of_ranks: an all-reduce if a rank holds some columns of the
    weight; None if it holds whole rows. A layer without magnitudes is unchanged."""
    magnitudes: Any = getattr(layer, "lora_magnitude_vector", {})
    if ADAPTER in magnitudes:
        magnitudes[ADAPTER] = _Magnitudes(magnitudes[ADAPTER].weight, sum_of_ranks)


class _Magnitudes(nn.Module):
    """Replaces peft's module, with the same `forward` arguments: returns what DoRA adds to `base_result`."""

    def __init__(self, weight: nn.Parameter, sum_of_ranks: Sum | None) -> None:
        super().__init__()
        self.weight = weight
        self.sum_of_ranks = sum_of_ranks

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: nn.Module,
        base_result: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        assert base_result is not None, "dropout of adapters is refused where ranks share them"
        own = self._squares(base_layer, lora_A, lora_B, scaling, x.dtype)
        sum_of_ranks = self.sum_of_ranks
        if sum_of_ranks is not None:
            own = cached_exchange(lambda made: sum_of_ranks(own) if made is None else made, own)
        scale = self.weight / own.sqrt().to(x.dtype)
        bias: Any = base_layer.bias
        plain = base_result if bias is None else base_result - bias
        return (scale - 1) * plain + scale * (lora_B(lora_A(x)) * scaling)

    @torch.no_grad()
    def _squares(self, base: Any, first: Any, second: Any, scaling: float, dtype: torch.dtype) -> Tensor:
        """Return the sum of squares of each row of this rank's shard of the adapted weight, in fp32."""
        adapted = base.weight.to(dtype) + scaling * (second.weight @ first.weight).to(dtype)
        return adapted.float().square().sum(dim=1)
