"""Sequence parallelism: between the regions of a stage's blocks (see `tensor_plan`) each tensor-parallel rank has its
part of the tokens only.

Norms, residuals and dropout between regions are divided like the rest, and so is what they keep for the backward. A
region is entered by an all-gather and left by a reduce-scatter, which together move what an all-reduce does
(Korthikanti et al. 2022, section 4.2.2). Each of these is the other's backward.

Of many rows both move in pieces, each of some rows of every rank: while one travels, the products of those that are
there are computed, and products leave while the next are computed (StepCCL, DistTrain section 7).

The hidden states of a microbatch, [items, tokens, width], or [tokens, width] of towers that pack, are taken as rows.
All ranks have equally many of them, one behind the other, the last ranks perhaps some of zeros, which no region sees
and which get no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from dilatant.attention.context_parallel import Pending
from dilatant.attention.recompute_cache import exchange_kept


class Ranks(Protocol):
    """Ranks that share a stage's layers, as a `comm.tensor_group.TensorGroup`. index: this rank's place among them."""

    size: int
    index: int
    rows_of_piece: int | None

    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, Pending]: ...

    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, Pending]: ...

    def copy(self, hidden: Tensor) -> Tensor: ...

    def sum(self, part: Tensor) -> Tensor: ...


PIECES = 4
"""Rows travel in at most so many pieces: with four, three quarters of the communication can hide."""

Product = Callable[[Tensor], Tensor]
"""Of rows [..., width] with a weight."""


class TokenShards:
    """Of one stage; it knows the shape of the microbatch that the stage runs now.

    rows_of_piece: a piece has at least so many rows of each rank; None where nothing travels in pieces.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rows_of_piece = ranks.rows_of_piece
        self._shape: tuple[int, ...] | None = None

    def split(self, hidden: Tensor) -> Tensor:
        """This rank's rows, [1, rows, width], of hidden states that all ranks have, [items, tokens, width]; or
        [rows, width] of [tokens, width]."""
        self._shape = tuple(hidden.shape[:-1])
        return _Split.apply(hidden, self.ranks)

    def split_beside(self, beside: Tensor) -> Tensor:
        """This rank's rows of what blocks take beside hidden states, [items, tokens, ...], before `split` of these."""
        return _Split.apply(beside.flatten(2), self.ranks).unflatten(-1, beside.shape[2:])

    def join(self, own: Tensor) -> Tensor:
        """All hidden states of which each rank has its `own` rows, for what all ranks compute alike."""
        shape, self._shape = self._whole(), None
        return _Join.apply(own, self.ranks, shape)

    def join_beside(self, own: Tensor, shape: Sequence[int]) -> Tensor:
        """What a block made beside the hidden states that were joined, whose shape was [*shape, width]."""
        return _Join.apply(own, self.ranks, tuple(shape))

    def gather(self, own: Tensor) -> Tensor:
        """As `join`, for a region of which each rank computes a share: gradients of all ranks are summed."""
        return _Gather.apply(own, self.ranks, self._whole())

    def gather_products(self, own: Tensor, products: Sequence[Product]) -> tuple[Tensor, list[Tensor]]:
        """`gather`, and products of what it returns; none where they need not be computed now, to hide what travels."""
        pieces = self._pieces(own.shape[-2])
        if len(pieces) == 1:
            return self.gather(own), []
        gathered: list[list[Tensor]] = []
        with _Travel(self.ranks, pieces) as travel:
            for number, piece in enumerate(_Depart.apply(_rows(own), travel)):
                hidden = _Await.apply(piece, travel, number)
                gathered.append([hidden, *(product(hidden) for product in products)])
        hidden, *outputs = (_flat(torch.cat(parts, 1), self._whole()) for parts in zip(*gathered))
        return hidden, outputs

    def sum_products(self, input: Tensor, product: Product) -> Tensor:
        """This rank's rows of the sum of all ranks' `product(input)`. input: [..., tokens, width]."""
        size = self.ranks.size
        pieces = self._pieces(_rows_of_each(input.shape[:-1], size))

        def exchange(made: Tensor | None) -> Tensor:
            if len(pieces) == 1:
                return _Scatter.apply(product(input), self.ranks, made)
            rows = _padded(_rows(input), size).unflatten(0, (size, -1))
            with _Travel(self.ranks, pieces, made) as travel:
                parts = [
                    _Send.apply(product(rows[:, first:end]), travel, number)
                    for number, (first, end) in enumerate(pieces)
                ]
                return _Arrive.apply(travel, *parts)

        return _shaped(exchange_kept(exchange, input), input.ndim)

    def sum_parts(self, part: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' `part`, [items, tokens, width]."""
        return self.sum_products(part, lambda rows: rows)

    def is_share(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape, in a block, is of this rank's rows."""
        if self._shape is None or len(shape) <= len(self._shape):
            return False
        rows = _rows_of_each(self._shape, self.ranks.size)
        return tuple(shape[: len(self._shape)]) == (*(1,) * (len(self._shape) - 1), rows)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all hidden states of which this rank's rows have `shape`."""
        return (*self._whole(), *shape[len(self._whole()) :])

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor of all, [items, tokens, ...]."""
        lead = len(self._whole())
        return _own_rows(whole.flatten(0, lead - 1), self.ranks)[(None,) * (lead - 1)]

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the forward of a block that runs now, and for the same again in its backward: see `recompute`."""
        return nullcontext(), self._again(self._shape)

    @contextmanager
    def _again(self, shape: tuple[int, ...] | None) -> Iterator[None]:
        before, self._shape = self._shape, shape
        try:
            yield
        finally:
            self._shape = before

    def _pieces(self, rows: int) -> list[tuple[int, int]]:
        """Borders of the pieces of each rank's rows."""
        count = 1 if self.rows_of_piece is None else max(1, min(PIECES, rows // self.rows_of_piece))
        return [(rows * n // count, rows * (n + 1) // count) for n in range(count)]

    def _whole(self) -> tuple[int, ...]:
        assert self._shape is not None, "outside of a stage's blocks"
        return self._shape


def _rows_of_each(shape: Sequence[int], size: int) -> int:
    return -(-prod(shape) // size)


def _rows(hidden: Tensor) -> Tensor:
    """[rows, width] of [..., rows, width]."""
    return hidden.flatten(0, -2)


def _shaped(rows: Tensor, dimensions: int) -> Tensor:
    """[rows, width], or [1, rows, width] where hidden states have three dimensions."""
    return rows[(None,) * (dimensions - 2)]


def _own_rows(rows: Tensor, ranks: Ranks) -> Tensor:
    each = -(-len(rows) // ranks.size)
    own = rows[each * ranks.index : each * (ranks.index + 1)]
    missing = each - len(own)
    # A copy in any case: what is kept of it must not keep the whole.
    return functional.pad(own, (0, 0) * (own.ndim - 1) + (0, missing)) if missing else own.clone()


def _all_rows(own: Tensor, ranks: Ranks, shape: tuple[int, ...], what: str) -> Tensor:
    """[*shape, width] from everybody's rows, [rows, width]."""
    everybody, work = ranks.all_gather(own, what)
    work.wait()
    return _flat(everybody, shape)


def _flat(everybody: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[*shape, width] from the rows of ranks, [ranks, rows, width]."""
    return everybody.flatten(0, 1)[: prod(shape)].unflatten(0, shape)


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = -len(rows) % size
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _sum_of_own_rows(part: Tensor, ranks: Ranks, what: str) -> Tensor:
    """[rows, width] of the sum of everybody's [..., width]."""
    rows = _padded(_rows(part), ranks.size)
    own, work = ranks.reduce_scatter(rows.unflatten(0, (ranks.size, -1)), what)
    work.wait()
    return own


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks, ctx.shape = ranks, tuple(hidden.shape[:-1])
        return _shaped(_own_rows(_rows(hidden), ranks), hidden.ndim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_rows(_rows(gradient), ctx.ranks, ctx.shape, "gradients of hidden states"), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, shape: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return _all_rows(_rows(own), ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _shaped(_own_rows(_rows(gradient), ctx.ranks), gradient.ndim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks, shape: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return _all_rows(_rows(own), ranks, shape, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = _sum_of_own_rows(gradient, ctx.ranks, "gradients of hidden states")
        return _shaped(own, gradient.ndim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, made: Tensor | None) -> Tensor:
        ctx.ranks, ctx.shape = ranks, tuple(part.shape[:-1])
        return _sum_of_own_rows(part, ranks, "hidden states") if made is None else made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(gradient, ctx.ranks, ctx.shape, "gradients of hidden states"), None, None


class _Travel:
    """Pieces under way, of one crossing between what ranks share and what each has. made: this rank's rows, where
    they are known already and nothing is sent."""

    def __init__(self, ranks: Ranks, pieces: Sequence[tuple[int, int]], made: Tensor | None = None) -> None:
        self.ranks = ranks
        self.pieces = pieces
        self.made = made
        self.arriving: dict[int, tuple[Tensor, Pending]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Recomputation may end before all pieces were taken, and what still arrives needs its memory.
        for number in [*self.arriving]:
            self.take(number)

    def gather(self, own: Tensor, what: str, last_first: bool = False) -> None:
        """Start all pieces of rows [rows, width]. last_first: as backwards take them."""
        for number in sorted(range(len(self.pieces)), reverse=last_first):
            first, end = self.pieces[number]
            self.arriving[number] = self.ranks.all_gather(own[first:end], what)

    def scatter(self, number: int, parts: Tensor, what: str) -> Tensor:
        """Start the sum of a piece; what is returned is there after `wait`."""
        own, work = self.ranks.reduce_scatter(parts, what)
        self.arriving[number] = own, work
        return own

    def take(self, number: int) -> Tensor:
        """A piece, when it is there."""
        tensor, work = self.arriving.pop(number)
        work.wait()
        return tensor

    def take_all(self) -> Tensor:
        """All pieces, one behind the other."""
        return torch.cat([self.take(number) for number in range(len(self.pieces))])


class _Depart(torch.autograd.Function):
    """This rank's pieces, of which those of all ranks are on their way from now on."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, travel: _Travel) -> tuple[Tensor, ...]:
        ctx.travel = travel
        travel.gather(own, "hidden states")
        return tuple(own[first:end] for first, end in travel.pieces)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.take_all(), None


class _Await(torch.autograd.Function):
    """A piece of all ranks' rows. Its gradient leaves for the ranks, and is there where `_Depart` asks for it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, travel: _Travel, number: int) -> Tensor:
        ctx.travel, ctx.number = travel, number
        return travel.take(number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.travel.scatter(ctx.number, gradient, "gradients of hidden states"), None, None


class _Send(torch.autograd.Function):
    """A piece of products on its way to the ranks; it is there where `_Arrive` asks for it."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, travel: _Travel, number: int) -> Tensor:
        ctx.travel, ctx.number = travel, number
        if travel.made is not None:
            first, end = travel.pieces[number]
            return travel.made[first:end]
        return travel.scatter(number, parts, "hidden states")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.travel.take(ctx.number), None, None


class _Arrive(torch.autograd.Function):
    """This rank's rows from its pieces, whose gradients leave for all ranks in the backward."""

    @staticmethod
    def forward(ctx: Any, travel: _Travel, *parts: Tensor) -> Tensor:
        ctx.travel = travel
        return travel.take_all() if travel.made is None else travel.made.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.travel.gather(gradient, "gradients of hidden states", last_first=True)
        return None, *(gradient[first:end] for first, end in ctx.travel.pieces)
