"""Expert parallelism: the group of ranks that hold different experts, and its differentiable token exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilatant.comm.group import Group


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
        self._group.all_to_all(
            received.view(-1), sent.contiguous().view(-1), each, each, "counts of tokens"
        ).wait()
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
    def forward(
        ctx: Any, rows: Tensor, ranks: ExpertGroup, sent: tuple[int, ...], received: tuple[int, ...]
    ) -> Tensor:
        ctx.ranks, ctx.sent, ctx.received = ranks, sent, received
        return ranks._move(rows, sent, received, "tokens of experts")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks._move(gradient, ctx.received, ctx.sent, "gradients of experts"), None, None, None
