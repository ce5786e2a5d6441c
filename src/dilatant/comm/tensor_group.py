"""Tensor and expert parallelism: the groups of ranks that shard layers or experts of a stage, and their collectives.

If all ranks have the same rows and each computes a shard of the features, `copy` enters such a region (identity in
forward, all-reduce of gradients in backward) and `sum` leaves it (all-reduce in forward, identity in backward): f and g
of Megatron-LM (Shoeybi et al. 2019). `all_gather` and `reduce_scatter` move rows that are sharded over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.group import Group, Pending

ROWS_OF_PIECE = 512
"""Rows per overlapped piece; on GPUs the product of fewer rows takes longer than the overlapped transfer."""


class TensorGroup:
    """The tensor-parallel ranks of a stage. index: this rank's place among them. rows_of_piece: rows of each rank in
    one collective when collectives are overlapped with products; None if overlap does not help, as on a CPU, whose
    cores do both."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size = len(group.ranks)
        self.index = group.index
        self.rows_of_piece = ROWS_OF_PIECE if group.is_on_device else None

    def copy(self, hidden: Tensor) -> Tensor:
        """Enter a tensor-parallel region: `hidden`, equal on all ranks; backward sums the gradients over the ranks."""
        return _Copy.apply(hidden, self)

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of `part` over the ranks, on each of them. `part` is overwritten if it is contiguous."""
        return _SummedTensor.apply(part.contiguous(), self)

    @torch.no_grad()
    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of `values` over the ranks."""
        largest = values.detach().clone(memory_format=torch.contiguous_format)
        self._group.max_(largest, "maxima of tensor-parallel ranks").wait()
        return largest

    @torch.no_grad()
    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, Pending]:
        """Gather `own` (equal shapes) from all ranks: returns [ranks, *own.shape], and the handle to wait for."""
        everybody = own.new_empty(self.size, *own.shape)
        return everybody, self._group.all_gather(everybody, own.contiguous(), f"{what} of tensor-parallel ranks")

    @torch.no_grad()
    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, Pending]:
        """Sum `parts` [ranks, ...] over the ranks and return this rank's part, and the handle to wait for."""
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
        # Clone, because others may still read the tensor that autograd passes.
        own = gradient.clone(memory_format=torch.contiguous_format)
        return ctx.ranks._sum_(own, "gradients of hidden states"), None


class _SummedTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.mark_dirty(part)
        return ranks._sum_(part, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ExpertGroup:
    """The expert-parallel ranks of a stage, in the order of their experts. All ranks must call each method."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.size = len(group.ranks)

    @torch.no_grad()
    def counts(self, sent: Tensor) -> Tensor:
        """Exchange row counts. sent: int64 [ranks, experts per rank], rows from this rank to each expert. Returns the
        rows from each rank to each local expert: int64 [ranks, experts per rank]."""
        received = torch.empty_like(sent)
        each = [sent.shape[1]] * self.size
        self._group.all_to_all(received.view(-1), sent.contiguous().view(-1), each, each, "counts of tokens").wait()
        return received

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows; differentiable. Returns the received rows in rank order: [sum of received, hidden].

        rows: [sum of sent, hidden], ordered by target rank. sent, received: number of rows to and from each rank.
        """
        return _RowExchange.apply(rows, self, tuple(sent), tuple(received))

    def _move(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], what: str) -> Tensor:
        width = rows.shape[1]
        arrived = rows.new_empty(sum(received), width)
        self._group.all_to_all(
            arrived.view(-1),
            rows.contiguous().view(-1),
            [count * width for count in received],
            [count * width for count in sent],
            what,
        ).wait()
        return arrived


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: ExpertGroup, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks._move(rows, sent, received, "tokens of experts")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks._move(gradient, ctx.received, ctx.sent, "gradients of experts"), None, None, None
