"""Block tables: the key blocks that each query block must visit, for kernels; and block workloads, for the planner.

They are computed from runs, so neither tokens x tokens nor blocks x blocks is ever stored. Tables are always sound: an
empty block hides no visible pair, a full block contains no hidden one. They are exact (see `BlockTable.exact`) unless a
row needs more intervals than allowed or the mask is as ragged as noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dilatant.attention.masks.mask import MAX_SAMPLES, SAMPLE, SAMPLE_SHIFT, AttentionMask, MaskError, Runs


class BlockKind(IntEnum):
    """Treatment of a block of scores by a kernel: skip, mask, or compute without masking."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Sorted disjoint intervals of column blocks, with their kind, per row block; other column blocks are empty.

    Rows are query blocks and columns key blocks, or the reverse in a transposed table. Interval i covers column blocks
    `start[i] : start[i] + length[i]`; row r has intervals `offsets[r] : offsets[r + 1]`. The last block of a side may
    be short; "full" refers to the tokens that exist. `full_blocks` and `partial_blocks` count the column blocks of each
    row. `exact` means that no empty block is listed and no full block is listed as partial.
    """

    offsets: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    kind: NDArray[np.int8]
    row_block: int
    column_block: int
    row_tokens: int
    column_tokens: int
    exact: bool

    @property
    def num_rows(self) -> int:
        return self.offsets.size - 1

    @property
    def num_columns(self) -> int:
        return -(-self.column_tokens // self.column_block)

    @property
    def full_blocks(self) -> NDArray[np.int64]:
        """Full column blocks of each row: int64 `[rows]`."""
        return self._blocks(BlockKind.FULL)

    @property
    def partial_blocks(self) -> NDArray[np.int64]:
        """Partial column blocks of each row: int64 `[rows]`."""
        return self._blocks(BlockKind.PARTIAL)

    def _blocks(self, kind: BlockKind) -> NDArray[np.int64]:
        total = np.concatenate([[0], np.cumsum(np.where(self.kind == kind, self.length, 0))])
        return np.diff(total[self.offsets])

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.start.nbytes + self.length.nbytes + self.kind.nbytes

    def transposed(self, max_intervals: int = 512) -> BlockTable:
        """Return the transposed table (rows are key blocks), for the gradients of keys and values."""
        from dilatant.attention.masks.sweep import join_nearest
        from dilatant.attention.masks.transpose import transpose

        _check_room(max_intervals)
        packed = np.stack([self.start, self.length, self.kind.astype(np.int32)], axis=1)
        offsets, intervals = transpose(self.offsets.astype(np.int64), packed, self.num_columns)
        offsets, intervals, exact = join_nearest(offsets, intervals, max_intervals)
        return BlockTable(
            **_columns(offsets, intervals),
            row_block=self.column_block,
            column_block=self.row_block,
            row_tokens=self.column_tokens,
            column_tokens=self.row_tokens,
            exact=self.exact and exact,
        )


def block_table(
    mask: AttentionMask,
    block: int = 128,
    key_block: int | None = None,
    *,
    keys: AttentionMask | None = None,
    max_intervals: int = 512,
) -> BlockTable:
    """Return the table of query blocks of `block` tokens against key blocks of `key_block` tokens (default the same).

    `keys` is the mask of the keys if they are not the queries' own row: a context-parallel rank holds some of the
    queries and all keys. In a row of more than `max_intervals` intervals, neighbours are joined as partial where that
    is cheapest, which bounds memory to rows x `max_intervals`.
    """
    keys = mask if keys is None else keys
    key_block = block if key_block is None else key_block
    _check_blocks(block, key_block)
    _check_room(max_intervals)
    exact, offsets, intervals, _ = _sweep(mask, keys, block, key_block, True, max_intervals)
    return BlockTable(
        **_columns(offsets, intervals),
        row_block=block,
        column_block=key_block,
        row_tokens=mask.num_tokens,
        column_tokens=keys.num_tokens,
        exact=exact,
    )


def block_workloads(
    mask: AttentionMask, block: int = 128, key_block: int | None = None, *, keys: AttentionMask | None = None
) -> NDArray[np.int64]:
    """Return the work of each block of query tokens, int64 `[blocks]`: the number of key blocks with at least one
    visible pair (Cornstarch, the thesis, algorithm 1). A short last block is charged like a whole one, as a kernel
    computes it."""
    key_block = block if key_block is None else key_block
    _check_blocks(block, key_block)
    _, _, _, counts = _sweep(mask, mask if keys is None else keys, block, key_block, False, 0)
    return counts.sum(axis=1)


def _check_blocks(block: int, key_block: int) -> None:
    if block < 1 or key_block < 1:
        raise MaskError(f"blocks must hold at least one token, got {block} query and {key_block} key tokens")


def _check_room(max_intervals: int) -> None:
    if max_intervals < 3:
        raise MaskError(f"max_intervals must be at least 3 (partial, full, partial), got {max_intervals}")


def _packed(runs: Runs) -> NDArray[np.int64]:
    return np.stack([runs.start, runs.length, runs.field, runs.position])


def _size(block: int) -> tuple[int, int]:
    return block, block.bit_length() - 1 if block & (block - 1) == 0 else -1


def _sweep(
    mask: AttentionMask, keys: AttentionMask, block: int, key_block: int, store: bool, most: int
) -> tuple[bool, NDArray, NDArray, NDArray]:
    """Return exactness, offsets, intervals and counts as `sweep.sweep` does; for masks as ragged as noise, whose sweep
    would cost tokens x tokens, those of `_by_sample`."""
    from dilatant.attention.masks import sweep

    query_runs = _packed(mask.runs)
    key_runs = query_runs if keys is mask else _packed(keys.runs)
    window = -1 if mask.window is None else mask.window
    tokens = mask.num_tokens, keys.num_tokens
    budget = max(1 << 22, -(-tokens[0] // block) * -(-tokens[1] // key_block))
    finished, exact, offsets, intervals, counts = sweep.sweep(
        query_runs, key_runs, window, _size(block), _size(key_block), *tokens, store, most, budget
    )
    return (exact, offsets, intervals, counts) if finished else (False, *_by_sample(mask, keys, block, key_block))


def _by_sample(
    mask: AttentionMask, keys: AttentionMask, block: int, key_block: int
) -> tuple[NDArray, NDArray, NDArray]:
    """Return offsets, intervals and counts in which each query block visits, masked, all key blocks between the first
    and the last token of its samples."""
    low, high = np.full(MAX_SAMPLES, keys.num_tokens), np.zeros(MAX_SAMPLES, np.int64)
    runs, sample = keys.runs, (keys.runs.field & SAMPLE) >> SAMPLE_SHIFT
    np.minimum.at(low, sample, runs.start // key_block)
    np.maximum.at(high, sample, -(-(runs.start + runs.length) // key_block))
    runs, num_rows = mask.runs, -(-mask.num_tokens // block)
    first, end = runs.start // block, -(-(runs.start + runs.length) // block)
    sample = np.repeat((runs.field & SAMPLE) >> SAMPLE_SHIFT, end - first)
    row = np.arange(sample.size) - np.repeat(np.cumsum(end - first) - end, end - first)
    begin, stop = np.full(num_rows, keys.num_tokens), np.zeros(num_rows, np.int64)
    np.minimum.at(begin, row, low[sample])
    np.maximum.at(stop, row, high[sample])
    sees = stop > begin
    length = np.where(sees, stop - begin, 0)
    intervals = np.stack([begin, length, np.full(num_rows, BlockKind.PARTIAL)], axis=1)[sees]
    return np.append(0, np.cumsum(sees)), intervals, np.stack([np.zeros_like(length), length], axis=1)


def _columns(offsets: NDArray, intervals: NDArray) -> dict:
    return {
        "offsets": offsets.astype(np.int32),
        "start": np.ascontiguousarray(intervals[:, 0], dtype=np.int32),
        "length": np.ascontiguousarray(intervals[:, 1], dtype=np.int32),
        "kind": np.ascontiguousarray(intervals[:, 2], dtype=np.int8),
    }
