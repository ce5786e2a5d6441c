"""Ranks that share the layers of a stage, and the collectives of tensor parallelism.

Where all ranks have the same rows and each computes with a share of features, `copy` is the way in (nothing forward,
the sum of the ranks' gradients backward) and `sum` the way out (the sum forward, nothing backward; Megatron-LM, Shoeybi
et al. 2019, f and g). `all_gather` and `reduce_scatter` move rows of which each rank has some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dilatant.comm.group import Group, Pending

ROWS_OF_PIECE = 512
"""On GPUs products of fewer rows take longer than what travels meanwhile."""


class TensorGroup:
    """The tensor-parallel ranks of a stage. index: this rank's place among them. rows_of_piece: so many rows of each
    rank are worth a collective of their own, behind which products are computed; None where these would wait for
    processors that send, as on a CPU."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size = len(group.ranks)
        self.index = group.index
        self.rows_of_piece = ROWS_OF_PIECE if group.is_on_device else None

    def copy(self, hidden: Tensor) -> Tensor:
        """`hidden`, the same on all ranks, for a region of which each rank computes a share."""
        return _Copy.apply(hidden, self)

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, on each of them. `part` is overwritten if it is contiguous."""
        return _Sum.apply(part.contiguous(), self)

    @torch.no_grad()
    def largest(self, values: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' `values`."""
        largest = values.detach().clone(memory_format=torch.contiguous_format)
        self._group.max_(largest, "maxima of tensor-parallel ranks").wait()
        return largest

    @torch.no_grad()
    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, Pending]:
        """[ranks, *own.shape], everybody's `own`, of one shape on all of them; and when it may be read."""
        everybody = own.new_empty(self.size, *own.shape)
        return everybody, self._group.all_gather(
            everybody, own.contiguous(), f"{what} of tensor-parallel ranks"
        )

    @torch.no_grad()
    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, Pending]:
        """Of `parts`, [ranks, ...] on each of them, the sum over ranks of this rank's; and when it may be read."""
        own = parts.new_empty(parts.shape[1:])
        return own, self._group.reduce_scatter(own, parts.contiguous(), f"{what} of tensor-parallel ranks")

    def _sum_(self, tensor: Tensor, what: str) -> Tensor:
        self._group.sum_(tensor, f"{what} of tensor-parallel ranks").wait()
        return tensor


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: others may still read the tensor that autograd hands over.
        own = gradient.clone(memory_format=torch.contiguous_format)
        return ctx.ranks._sum_(own, "gradients of hidden states"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.mark_dirty(part)
        return ranks._sum_(part, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
