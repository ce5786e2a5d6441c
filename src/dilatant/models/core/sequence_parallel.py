"""Sequence parallelism: outside attention and feed-forward, each tensor-parallel rank holds a slice of the tokens.

Norms, residuals and dropout between the tensor-parallel regions (see `tensor_plan`) run on the slice, and their
activations are saved for the slice only. A region begins with an all-gather and ends with a reduce-scatter, which
together move as many bytes as an all-reduce (Korthikanti et al. 2022, section 4.2.2). Each is the other's backward.

Large inputs are moved in chunks of rows, so that communication of one chunk overlaps with the matrix product of
another: products of gathered chunks run while later chunks arrive, and results are reduced while later products are
computed (StepCCL, DistTrain section 7).

The hidden states of a microbatch, [items, tokens, width] or [tokens, width] for packing encoders, are flattened to
rows. Every rank has equally many contiguous rows; the last ranks pad with zero rows that no region sees and that get no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from dilatant.attention.context_parallel import PendingRows
from dilatant.attention.recompute_cache import cached_exchange


class SequenceRanks(Protocol):
    """The tensor-parallel ranks of a stage, as in `comm.tensor_group.TensorGroup`. index: this rank's index."""

    size: int
    index: int
    rows_of_piece: int | None

    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, PendingRows]: ...

    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, PendingRows]: ...

    def copy(self, hidden: Tensor) -> Tensor: ...

    def sum(self, part: Tensor) -> Tensor: ...


PIECES = 4
"""Maximum number of chunks: with four, three quarters of the communication can be hidden."""

TokenProduct = Callable[[Tensor], Tensor]
"""The product of rows [..., width] with a weight."""


class TokenShards:
    """Sequence parallelism of one stage; stores the shape of the current microbatch. rows_of_piece: minimum number of
    rows per rank in a chunk; None disables chunking."""

    def __init__(self, ranks: SequenceRanks) -> None:
        self.ranks = ranks
        self.rows_of_piece = ranks.rows_of_piece
        self._shape: tuple[int, ...] | None = None

    def split(self, hidden: Tensor) -> Tensor:
        """Slice replicated hidden states: [items, tokens, width] to [1, rows, width], or [tokens, width] to [rows,
        width]."""
        self._shape = tuple(hidden.shape[:-1])
        return _Split.apply(hidden, self.ranks)

    def split_beside(self, beside: Tensor) -> Tensor:
        """Slice another block input, [items, tokens, ...], to this rank's rows; call before `split` of the hidden
        states."""
        return _Split.apply(beside.flatten(2), self.ranks).unflatten(-1, beside.shape[2:])

    def join(self, own: Tensor) -> Tensor:
        """All-gather the hidden states for replicated computation: each rank passes its `own` rows."""
        shape, self._shape = self._whole(), None
        return _Join.apply(own, self.ranks, shape)

    def join_beside(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        """All-gather another output of the blocks, after `join`; the hidden states had shape [*shape, width]."""
        return _Join.apply(own, self.ranks, tuple(shape))

    def gather(self, own: Tensor) -> Tensor:
        """All-gather like `join`, but for a tensor-parallel region: the backward sums the gradients of all ranks."""
        return _Gather.apply(own, self.ranks, self._whole())

    def gather_products(self, own: Tensor, products: Sequence[TokenProduct]) -> tuple[Tensor, list[Tensor]]:
        """Return `gather(own)` and its products with weights, overlapped in chunks; without chunking, no products."""
        pieces = self._pieces(own.shape[-2])
        if len(pieces) == 1:
            return self.gather(own), []
        gathered: list[list[Tensor]] = []
        with _ChunkTransfer(self.ranks, pieces) as travel:
            for number, piece in enumerate(_StartAllGather.apply(_rows(own), travel)):
                hidden = _WaitForChunk.apply(piece, travel, number)
                gathered.append([hidden, *(product(hidden) for product in products)])
        hidden, *outputs = (_flat(torch.cat(parts, 1), self._whole()) for parts in zip(*gathered))
        return hidden, outputs

    def sum_products(self, input: Tensor, product: TokenProduct) -> Tensor:
        """Return this rank's rows of `product(input)` summed over all ranks. input: [..., tokens, width]."""
        size = self.ranks.size
        pieces = self._pieces(_rows_of_each(input.shape[:-1], size))

        def exchange(made: Tensor | None) -> Tensor:
            if len(pieces) == 1:
                return _Scatter.apply(product(input), self.ranks, made)
            rows = _padded(_rows(input), size).unflatten(0, (size, -1))
            with _ChunkTransfer(self.ranks, pieces, made) as travel:
                parts = [
                    _SendProducts.apply(product(rows[:, first:end]), travel, number)
                    for number, (first, end) in enumerate(pieces)
                ]
                return _CollectReducedRows.apply(travel, *parts)

        return _shaped(cached_exchange(exchange, input), input.ndim)

    def sum_parts(self, part: Tensor) -> Tensor:
        """Return this rank's rows of the sum over all ranks of `part`, [items, tokens, width]."""
        return self.sum_products(part, lambda rows: rows)

    def is_share(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of this shape, inside a block, holds only this rank's rows."""
        if self._shape is None or len(shape) <= len(self._shape):
            return False
        rows = _rows_of_each(self._shape, self.ranks.size)
        return tuple(shape[: len(self._shape)]) == (*(1,) * (len(self._shape) - 1), rows)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape over all ranks of a tensor whose rows on this rank have `shape`."""
        return (*self._whole(), *shape[len(self._whole()) :])

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a replicated tensor [items, tokens, ...]."""
        lead = len(self._whole())
        return _local_rows(whole.flatten(0, lead - 1), self.ranks)[(None,) * (lead - 1)]

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a block's forward that runs now and of its recomputation (see `recompute`)."""
        return nullcontext(), self._again(self._shape)

    @contextmanager
    def _again(self, shape: tuple[int, ...] | None) -> Iterator[None]:
        before, self._shape = self._shape, shape
        try:
            yield
        finally:
            self._shape = before

    def _pieces(self, rows: int) -> list[tuple[int, int]]:
        """Return the borders of the chunks within each rank's rows."""
        count = 1 if self.rows_of_piece is None else max(1, min(PIECES, rows // self.rows_of_piece))
        return [(rows * n // count, rows * (n + 1) // count) for n in range(count)]

    def _whole(self) -> tuple[int, ...]:
        assert self._shape is not None, "outside of a stage's blocks"
        return self._shape


def _rows_of_each(shape: Sequence[int], size: int) -> int:
    return -(-prod(shape) // size)


def _rows(hidden: Tensor) -> Tensor:
    """Flatten [..., rows, width] to [rows, width]."""
    return hidden.flatten(0, -2)


def _shaped(rows: Tensor, dimensions: int) -> Tensor:
    """Return `rows` [rows, width], as [1, rows, width] if hidden states have three dimensions."""
    return rows[(None,) * (dimensions - 2)]


def _local_rows(rows: Tensor, ranks: SequenceRanks) -> Tensor:
    each = -(-len(rows) // ranks.size)
    own = rows[each * ranks.index : each * (ranks.index + 1)]
    missing = each - len(own)
    # Always a copy: a view saved for backward would keep the whole tensor alive.
    return functional.pad(own, (0, 0) * (own.ndim - 1) + (0, missing)) if missing else own.clone()


def _all_gather_rows(own: Tensor, ranks: SequenceRanks, shape: tuple[int, ...], what: str) -> Tensor:
    """All-gather every rank's rows [rows, width] to [*shape, width]."""
    everybody, work = ranks.all_gather(own, what)
    work.wait()
    return _flat(everybody, shape)


def _flat(everybody: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape the gathered rows [ranks, rows, width] to [*shape, width]."""
    return everybody.flatten(0, 1)[: prod(shape)].unflatten(0, shape)


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = -len(rows) % size
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _reduce_scatter_rows(part: Tensor, ranks: SequenceRanks, what: str) -> Tensor:
    """Reduce-scatter [..., width]: return this rank's rows [rows, width] of the sum."""
    rows = _padded(_rows(part), ranks.size)
    own, work = ranks.reduce_scatter(rows.unflatten(0, (ranks.size, -1)), what)
    work.wait()
    return own


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks, ctx.shape = ranks, tuple(hidden.shape[:-1])
        return _shaped(_local_rows(_rows(hidden), ranks), hidden.ndim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather_rows(_rows(gradient), ctx.ranks, ctx.shape, "gradients of hidden states"), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: SequenceRanks, shape: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return _all_gather_rows(_rows(own), ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shaped(_local_rows(_rows(gradient), ctx.ranks), gradient.ndim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: SequenceRanks, shape: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return _all_gather_rows(_rows(own), ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = _reduce_scatter_rows(gradient, ctx.ranks, "gradients of hidden states")
        return _shaped(own, gradient.ndim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: SequenceRanks, made: Tensor | None) -> Tensor:
        ctx.ranks, ctx.shape = ranks, tuple(part.shape[:-1])
        return _reduce_scatter_rows(part, ranks, "hidden states") if made is None else made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather_rows(gradient, ctx.ranks, ctx.shape, "gradients of hidden states"), None, None


class _ChunkTransfer:
    """The chunks in flight of one all-gather or reduce-scatter. made: in recomputation, this rank's cached result of
    the first forward, which replaces communication."""

    def __init__(
        self, ranks: SequenceRanks, pieces: Sequence[tuple[int, int]], made: Tensor | None = None
    ) -> None:
        self.ranks = ranks
        self.pieces = pieces
        self.made = made
        self.arriving: dict[int, tuple[Tensor, PendingRows]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Recomputation may stop early; wait, because chunks in flight still need their buffers.
        for number in [*self.arriving]:
            self.take(number)

    def gather(self, own: Tensor, what: str, last_first: bool = False) -> None:
        """Start the all-gather of every chunk of rows [rows, width]. last_first: in reverse order, as in backward."""
        for number in sorted(range(len(self.pieces)), reverse=last_first):
            first, end = self.pieces[number]
            self.arriving[number] = self.ranks.all_gather(own[first:end], what)

    def scatter(self, number: int, parts: Tensor, what: str) -> Tensor:
        """Start the reduce-scatter of a chunk; the returned tensor is valid after `wait`."""
        own, work = self.ranks.reduce_scatter(parts, what)
        self.arriving[number] = own, work
        return own

    def take(self, number: int) -> Tensor:
        """Wait for a chunk and return it."""
        tensor, work = self.arriving.pop(number)
        work.wait()
        return tensor

    def take_all(self) -> Tensor:
        """Wait for all chunks and return them concatenated."""
        return torch.cat([self.take(number) for number in range(len(self.pieces))])


class _StartAllGather(torch.autograd.Function):
    """Start the all-gather of all chunks; return this rank's chunks. Backward collects the reduced gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, travel: _ChunkTransfer) -> tuple[Tensor, ...]:
        ctx.travel = travel
        travel.gather(own, "hidden states")
        return tuple(own[first:end] for first, end in travel.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.take_all(), None


class _WaitForChunk(torch.autograd.Function):
    """Wait for a gathered chunk. Backward starts the reduce-scatter of its gradient, which `_StartAllGather`
    collects."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, travel: _ChunkTransfer, number: int) -> Tensor:
        ctx.travel, ctx.number = travel, number
        return travel.take(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.travel.scatter(ctx.number, gradient, "gradients of hidden states"), None, None


class _SendProducts(torch.autograd.Function):
    """Start the reduce-scatter of a chunk of products, for `_CollectReducedRows`. Backward waits for its gathered
    gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, travel: _ChunkTransfer, number: int) -> Tensor:
        ctx.travel, ctx.number = travel, number
        if travel.made is not None:
            first, end = travel.pieces[number]
            return travel.made[first:end]
        return travel.scatter(number, parts, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.travel.take(ctx.number), None, None


class _CollectReducedRows(torch.autograd.Function):
    """Collect this rank's rows from all chunks. Backward starts the all-gather of their gradients."""

    @staticmethod
    def forward(ctx: Any, travel: _ChunkTransfer, *parts: Tensor) -> Tensor:
        ctx.travel = travel
        return travel.take_all() if travel.made is None else travel.made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travel.gather(gradient, "gradients of hidden states", last_first=True)
        return None, *(gradient[first:end] for first, end in ctx.travel.pieces)
