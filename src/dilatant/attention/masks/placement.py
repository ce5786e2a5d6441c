"""Placement of query-token blocks on context-parallel ranks, such that all ranks finish together.

Cornstarch (the thesis, 3.3.2.1) with two changes: the descending sort that its algorithm 1 omits, and equal block
counts per rank, since equal shards balance MLP work, memory and the all-gather of keys and values too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dilatant.attention.masks.blocks import block_workloads
from dilatant.attention.masks.mask import AttentionMask
from dilatant.config.errors import UserError

POLICIES = ("contiguous", "zigzag", "lpt")
"""Policies of placement, the simplest first."""

LARGEST_BLOCK = 128
BLOCKS_PER_RANK = 4
"""A short row is divided into smaller blocks until each rank has this many."""

_SWAP_STEPS = 20_000


class PlacementError(UserError):
    """Error for blocks that cannot be placed as requested; the message gives the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Blocks on ranks; compared by identity.

    `rank_of_block`: int32 `[blocks]`. `loads`: `[ranks]`, the sum of workloads on each rank, in their unit and dtype.
    `bound`: a lower bound of the maximal load: the mean load, rounded up if workloads are integers, or the largest
    block.
    """

    rank_of_block: NDArray[np.int32]
    loads: NDArray
    bound: float

    @property
    def num_ranks(self) -> int:
        return self.loads.size

    @property
    def counts(self) -> NDArray[np.int64]:
        """Blocks on each rank: int64 `[ranks]`."""
        return np.bincount(self.rank_of_block, minlength=self.num_ranks)

    @property
    def gap(self) -> float:
        """Upper bound of the relative excess over the best possible maximal load: max / bound - 1."""
        return float(self.loads.max() / self.bound - 1) if self.bound else 0.0

    @property
    def imbalance(self) -> float:
        """Maximal over mean load; 1 is perfect."""
        total = self.loads.sum()
        return float(self.loads.max() * self.num_ranks / total) if total else 1.0

    def blocks_of_rank(self, rank: int) -> NDArray[np.int64]:
        """Return the rank's blocks in row order."""
        return np.flatnonzero(self.rank_of_block == rank)

    def tokens_of_rank(self, rank: int, num_tokens: int, block: int = 128) -> NDArray[np.int64]:
        """Return row indices of the rank's tokens in a row of `num_tokens`, in row order; the last block may be
        short."""
        if -(-num_tokens // block) != self.rank_of_block.size:
            raise PlacementError(
                f"{num_tokens} tokens make {-(-num_tokens // block)} blocks of {block}, "
                f"but {self.rank_of_block.size} were placed"
            )
        tokens = (self.blocks_of_rank(rank)[:, None] * block + np.arange(block)).ravel()
        return tokens[tokens < num_tokens]


def place_blocks(workloads: ArrayLike, num_ranks: int, policy: str = "lpt") -> Placement:
    """Place blocks of query tokens on ranks; block counts of ranks differ by one at most.

    Policies:
        contiguous: one chunk per rank.
        zigzag: 2 x ranks contiguous chunks; rank r holds chunks r and 2 x ranks - 1 - r: balanced for causal masks.
        lpt: the heaviest block first, to the least loaded rank that has room, then swaps of two blocks between the
            most loaded rank and another while they help. With tens of blocks per rank, within a thousandth of the
            bound.

    `workloads`: `[blocks]`, non-negative; see `block_workloads`. Raises PlacementError on an unknown policy, a workload
    that is negative or not finite, or no rank.
    """
    work = np.ascontiguousarray(workloads)
    if work.ndim != 1:
        raise PlacementError(f"workloads must be a vector, one a block; got shape {work.shape}")
    work = work.astype(np.int64 if work.dtype.kind in "iub" else np.float64, copy=False)
    problems = []
    if policy not in POLICIES:
        problems.append(f"unknown placement policy {policy!r}; known are {', '.join(POLICIES)}")
    if num_ranks < 1:
        problems.append(f"blocks need at least one rank to be placed on, got {num_ranks}")
    if work.size and not (work.min() >= 0 and work.max() < np.inf):
        block = int(np.argmin(np.where(np.isfinite(work), work, -1)))
        problems.append(f"workload {work[block]} of block {block} is not a finite number from 0 up")
    if problems:
        raise PlacementError("; ".join(problems))

    rank_of = _by_load(work, num_ranks) if policy == "lpt" else _by_place(work.size, num_ranks, policy)
    loads = np.zeros(num_ranks, dtype=work.dtype)
    np.add.at(loads, rank_of, work)
    return Placement(rank_of, loads, _bound(work, num_ranks))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRow:
    """A packed row of `num_tokens` in blocks of `block` tokens on ranks."""

    placement: Placement
    block: int
    num_tokens: int

    @property
    def owners(self) -> NDArray[np.int32]:
        """The rank of each token: `[tokens]`."""
        return np.repeat(self.placement.rank_of_block, self.block)[: self.num_tokens]


_CLOSE = 1.01
"""Maximal loads within this ratio count as equal in time."""


def place_row(mask: AttentionMask, num_ranks: int, policy: str = "auto") -> PlacedRow:
    """Place the tokens of a row with this mask on ranks; deterministic, so every rank gets the same result.

    A row of fewer tokens than ranks leaves some ranks without any. `policy` is one of `POLICIES`, or "auto": the first
    of these whose attention time equals that of the best. All other work of a rank depends only on its number of tokens
    and on the row's, which are equal under all policies.
    """
    block = LARGEST_BLOCK
    while block > 1 and block * BLOCKS_PER_RANK * num_ranks > mask.num_tokens:
        block //= 2
    work = block_workloads(mask, block)
    placed: list[Placement] = []
    for each in POLICIES if policy == "auto" else (policy,):
        placed.append(place_blocks(work, num_ranks, each))
        if placed[-1].gap <= _CLOSE - 1:  # no policy can be better
            return PlacedRow(placed[-1], block, mask.num_tokens)
    best = min(placement.loads.max() for placement in placed)
    chosen = next(placement for placement in placed if placement.loads.max() <= best * _CLOSE)
    return PlacedRow(chosen, block, mask.num_tokens)


def _bound(work: NDArray, num_ranks: int) -> float:
    if work.size == 0:
        return 0.0
    total = work.sum()
    mean = -(-total // num_ranks) if work.dtype == np.int64 else total / num_ranks
    return float(max(mean, work.max()))


def _by_place(blocks: int, num_ranks: int, policy: str) -> NDArray[np.int32]:
    counts = np.full(num_ranks, blocks // num_ranks)
    counts[: blocks % num_ranks] += 1
    ranks = np.arange(num_ranks, dtype=np.int32)
    if policy == "contiguous":
        return np.repeat(ranks, counts)
    heads = np.repeat(ranks, (counts + 1) // 2)
    return np.concatenate([heads, np.repeat(ranks[::-1], counts[::-1] // 2)])


def _by_load(work: NDArray, num_ranks: int) -> NDArray[np.int32]:
    """Place blocks longest first, then swap to recover the balance that equal counts cost."""
    from dilatant.attention.masks import lpt

    units, rank_bits = _integer_units(work, num_ranks)
    least = int(_bound(units, num_ranks))
    order = lpt.descending(units)
    rank_of = lpt.assign_longest_first(units, order, num_ranks, rank_bits)
    lpt.swap_to_even(units, order, rank_of, num_ranks, least + (least >> 14), _SWAP_STEPS + 8 * work.size)
    return rank_of


def _integer_units(work: NDArray, num_ranks: int) -> tuple[NDArray[np.int64], int]:
    """Return workloads as integers, and the bits of a rank number: sum and rank number fit in 62 bits together. Floats,
    and integers too large, are scaled by the power of two that makes them fit."""
    rank_bits = max(1, (num_ranks - 1).bit_length())
    bits = 62 - rank_bits
    if work.dtype == np.int64 and work.size * int(work.max(initial=0)) < 1 << bits:
        return work, rank_bits
    total = float(work.sum(dtype=np.float64))
    return np.ldexp(work.astype(np.float64), bits - 1 - int(np.frexp(total)[1])).astype(np.int64), rank_bits
