"""Sequence parallelism: between the regions of a stage's blocks (see `tensor_plan`) each tensor-parallel rank has its
part of the tokens only.

Norms, residuals and dropout between regions are divided like the rest, and so is what they keep for the backward. A
region is entered by an all-gather and left by a reduce-scatter, which together move what an all-reduce does
(Korthikanti et al. 2022, section 4.2.2). Each of these is the other's backward.

The hidden states of a microbatch, [items, tokens, width], are taken as items * tokens rows. All ranks have equally many
of them, one behind the other, the last ranks perhaps some of zeros, which no region sees and which get no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dilatant.attention.context_parallel import Pending


class Ranks(Protocol):
    """Ranks that share a stage's layers, as a `comm.tensor_group.TensorGroup`. index: this rank's place among them."""

    size: int
    index: int

    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, Pending]: ...

    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, Pending]: ...


class TokenShards:
    """Of one stage; it knows the shape of the microbatch that the stage runs now."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._shape: tuple[int, int] | None = None

    def split(self, hidden: Tensor) -> Tensor:
        """This rank's rows, [1, rows, width], of hidden states that all ranks have, [items, tokens, width]."""
        items, tokens, _ = hidden.shape
        self._shape = items, tokens
        return _Split.apply(hidden, self.ranks)

    def join(self, own: Tensor) -> Tensor:
        """All hidden states of which each rank has its `own` rows, for what all ranks compute alike."""
        shape, self._shape = self._whole(), None
        return _Join.apply(own, self.ranks, shape)

    def gather(self, own: Tensor) -> Tensor:
        """As `join`, for a region of which each rank computes a share: gradients of all ranks are summed."""
        return _Gather.apply(own, self.ranks, self._whole())

    def sum(self, part: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' `part`, [items, tokens, width]."""
        return _Scatter.apply(part, self.ranks)

    def is_share(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape, in a block, is of this rank's rows."""
        if self._shape is None or len(shape) < 3:
            return False
        return tuple(shape[:2]) == (1, _rows_of_each(self._shape, self.ranks.size))

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all hidden states of which this rank's rows have `shape`."""
        return (*self._whole(), *shape[2:])

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of all, [items, tokens, ...]."""
        return _own_rows(whole, self.ranks)[None]

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the forward of a block that runs now, and for the same again in its backward: see `recompute`."""
        return nullcontext(), self._again(self._shape)

    @contextmanager
    def _again(self, shape: tuple[int, int] | None) -> Iterator[None]:
        before, self._shape = self._shape, shape
        try:
            yield
        finally:
            self._shape = before

    def _whole(self) -> tuple[int, int]:
        assert self._shape is not None, "outside of a stage's blocks"
        return self._shape


def _rows_of_each(shape: tuple[int, int], size: int) -> int:
    return -(-shape[0] * shape[1] // size)


def _own_rows(hidden: Tensor, ranks: Ranks) -> Tensor:
    rows = hidden.flatten(0, 1)
    each = -(-len(rows) // ranks.size)
    own = rows[each * ranks.index : each * (ranks.index + 1)]
    missing = each - len(own)
    # A copy in any case: what is kept of it must not keep the whole.
    return functional.pad(own, (0, 0) * (own.ndim - 1) + (0, missing)) if missing else own.clone()


def _all_rows(own: Tensor, ranks: Ranks, shape: tuple[int, int], what: str) -> Tensor:
    """[items, tokens, width] from everybody's rows, [rows, width]."""
    everybody, work = ranks.all_gather(own, what)
    work.wait()
    return everybody.flatten(0, 1)[: shape[0] * shape[1]].unflatten(0, shape)


def _sum_of_own_rows(part: Tensor, ranks: Ranks, what: str) -> Tensor:
    """[rows, width] of the sum of everybody's [items, tokens, width]."""
    rows = part.flatten(0, 1)
    missing = -len(rows) % ranks.size
    padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    own, work = ranks.reduce_scatter(padded.unflatten(0, (ranks.size, -1)), what)
    work.wait()
    return own


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.shape = ranks, hidden.shape[:2]
        return _own_rows(hidden, ranks)[None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_rows(gradient[0], ctx.ranks, ctx.shape, "gradients of hidden states"), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, shape: tuple[int, int]) -> Tensor:
        ctx.ranks = ranks
        return _all_rows(own[0], ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_rows(gradient, ctx.ranks)[None], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, shape: tuple[int, int]) -> Tensor:
        ctx.ranks = ranks
        return _all_rows(own[0], ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_own_rows(gradient, ctx.ranks, "gradients of hidden states")[None], None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.shape = ranks, part.shape[:2]
        return _sum_of_own_rows(part, ranks, "hidden states")[None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_rows(gradient[0], ctx.ranks, ctx.shape, "gradients of hidden states"), None
