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
from functools import partial
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

RowExchange = Callable[[Tensor, str], Tensor]
"""Maps rows to rows by communication; the text says what they are, in errors."""
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
        return _Exchange.apply(hidden, self._slice, self._gathered(self._shape))

    def split_beside(self, beside: Tensor) -> Tensor:
        """Slice another block input, [items, tokens, ...], to this rank's rows; call before `split` of the hidden
        states."""
        gathered = self._gathered(beside.shape[:2])
        return _Exchange.apply(beside.flatten(2), self._slice, gathered).unflatten(-1, beside.shape[2:])

    def join(self, own: Tensor) -> Tensor:
        """All-gather the hidden states for replicated computation: each rank passes its `own` rows."""
        shape, self._shape = self._whole(), None
        return self.join_beside(own, shape)

    def join_beside(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        """All-gather another output of the blocks, after `join`; the hidden states had shape [*shape, width]."""
        return _Exchange.apply(own, self._gathered(shape), self._slice)

    def gather(self, own: Tensor) -> Tensor:
        """All-gather like `join`, but for a tensor-parallel region: the backward sums the gradients of all ranks."""
        return _Exchange.apply(own, self._gathered(self._shape_like(own)), self._reduce_scatter)

    def gather_products(self, own: Tensor, products: Sequence[TokenProduct]) -> tuple[Tensor, list[Tensor]]:
        """Return `gather(own)` and its products with weights, overlapped in chunks; without chunking, no products."""
        pieces = self._pieces(own.shape[-2])
        if len(pieces) == 1:
            return self.gather(own), []
        gathered: list[list[Tensor]] = []
        with _ChunkTransfer(self.ranks, pieces) as travel:
            for number, piece in enumerate(_StartAllGather.apply(_rows(own), travel)):
                hidden = _Exchange.apply(piece, partial(travel.take, number), partial(travel.scatter, number))
                gathered.append([hidden, *(product(hidden) for product in products)])
        hidden, *outputs = (_flat(torch.cat(parts, 1), self._shape_like(own)) for parts in zip(*gathered))
        return hidden, outputs

    def sum_products(self, input: Tensor, product: TokenProduct) -> Tensor:
        """Return this rank's rows of `product(input)` summed over all ranks. input: [..., tokens, width]."""
        size = self.ranks.size
        pieces = self._pieces(_rows_of_each(input.shape[:-1], size))

        def exchange(cached: Tensor | None) -> Tensor:
            if len(pieces) == 1:
                part = product(input)
                gathered = self._gathered(part.shape[:-1])
                if cached is None:
                    return _rows(_Exchange.apply(part, self._reduce_scatter, gathered))
                return _Exchange.apply(part, lambda *_: cached.detach(), gathered)
            rows = _padded(_rows(input), size).unflatten(0, (size, -1))
            with _ChunkTransfer(self.ranks, pieces, cached) as travel:
                parts = [
                    _Exchange.apply(product(rows[:, first:end]), partial(travel.scatter, n), partial(travel.take, n))
                    for n, (first, end) in enumerate(pieces)
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

    def _slice(self, hidden: Tensor, what: str) -> Tensor:
        """Return this rank's rows of replicated hidden states."""
        return _shaped(_local_rows(_rows(hidden), self.ranks), hidden.ndim)

    def _gathered(self, shape: Sequence[int]) -> RowExchange:
        """Return the all-gather of every rank's rows to [*shape, width]."""

        def gather(own: Tensor, what: str) -> Tensor:
            everybody, work = self.ranks.all_gather(_rows(own), what)
            work.wait()
            return _flat(everybody, shape)

        return gather

    def _reduce_scatter(self, part: Tensor, what: str) -> Tensor:
        """Return this rank's rows of the sum over all ranks of [..., width]."""
        rows = _padded(_rows(part), self.ranks.size)
        own, work = self.ranks.reduce_scatter(rows.unflatten(0, (self.ranks.size, -1)), what)
        work.wait()
        return _shaped(own, part.ndim)

    def _shape_like(self, own: Tensor) -> tuple[int, ...]:
        """Return the shape of all tokens, without the batch dimension of 1 if a block left it out of `own`."""
        return self._whole()[-(own.ndim - 1) :]

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


def _flat(everybody: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape the gathered rows [ranks, rows, width] to [*shape, width]."""
    return everybody.flatten(0, 1)[: prod(shape)].unflatten(0, shape)


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = -len(rows) % size
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


class _Exchange(torch.autograd.Function):
    """An exchange of rows; its backward is another one. For both: hidden states [..., rows, width] in and out."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, exchange: RowExchange, backward: RowExchange) -> Tensor:
        ctx.exchange = backward
        return exchange(hidden, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(gradient, "gradients of hidden states"), None, None


class _ChunkTransfer:
    """The chunks in flight of one all-gather or reduce-scatter. cached: in recomputation, this rank's cached result of
    the first forward, which replaces communication."""

    def __init__(self, ranks: SequenceRanks, pieces: Sequence[tuple[int, int]], cached: Tensor | None = None) -> None:
        self.ranks = ranks
        self.pieces = pieces
        self.cached = cached
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
        """Start the reduce-scatter of a chunk, unless its result is cached; it is valid after `take`."""
        if self.cached is not None:
            first, end = self.pieces[number]
            return self.cached[first:end]
        own, work = self.ranks.reduce_scatter(parts, what)
        self.arriving[number] = own, work
        return own

    def take(self, number: int, *_: Any) -> Tensor:
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


class _CollectReducedRows(torch.autograd.Function):
    """Collect this rank's rows from all chunks. Backward starts the all-gather of their gradients."""

    @staticmethod
    def forward(ctx: Any, travel: _ChunkTransfer, *parts: Tensor) -> Tensor:
        ctx.travel = travel
        return travel.take_all() if travel.cached is None else travel.cached.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travel.gather(gradient, "gradients of hidden states", last_first=True)
        return None, *(gradient[first:end] for first, end in ctx.travel.pieces)
