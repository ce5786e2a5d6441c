"""DoRA (Liu et al. 2024) beside a linear layer of which a tensor-parallel rank has a part.

The length of a row of the weight that is adapted is that of all its columns: a rank that has some of them needs the
sum of the ranks' squares. The length is a constant to the backward, as in peft (DoRA, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.attention.recompute_cache import exchange_kept
from dilatant.models.adapters.lora import ADAPTER

Sum = Callable[[Tensor], Tensor]


def share_magnitudes(layer: nn.Module, sum_of_ranks: Sum | None = None) -> None:
    """Let a layer of peft's know the lengths of whole rows. sum_of_ranks: where a rank has some columns of the weight;
    None where it has some rows. Nothing happens to one without magnitudes."""
    magnitudes: Any = getattr(layer, "lora_magnitude_vector", {})
    if ADAPTER in magnitudes:
        magnitudes[ADAPTER] = _Magnitudes(magnitudes[ADAPTER].weight, sum_of_ranks)


class _Magnitudes(nn.Module):
    """In the place of peft's, whose `forward` has these arguments: what DoRA adds to `base_result`."""

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
            own = exchange_kept(lambda made: sum_of_ranks(own) if made is None else made, own)
        scale = self.weight / own.sqrt().to(x.dtype)
        bias: Any = base_layer.bias
        plain = base_result if bias is None else base_result - bias
        return (scale - 1) * plain + scale * (lora_B(lora_A(x)) * scaling)

    @torch.no_grad()
    def _squares(self, base: Any, first: Any, second: Any, scaling: float, dtype: torch.dtype) -> Tensor:
        """Of each row of this rank's part of the adapted weight the sum of squares, in fp32."""
        adapted = base.weight.to(dtype) + scaling * (second.weight @ first.weight).to(dtype)
        return adapted.float().square().sum(dim=1)
