"""Work lists: the units into which a block table is divided for the multiprocessors of one GPU kernel launch.

A unit is one row of blocks, longest first (LPT: the order in which a greedy scheduler leaves the least idle time at the
end). Rows longer than the average load of a multiprocessor are split into several units, whose partial results a second
kernel joins (Cornstarch, the thesis, 3.3.2.2). Cornstarch splits every row at 4096 tokens and stores partial results
for all; here a row is split only if a simulation of the greedy order shows that this shortens the launch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dilatant.attention.masks.blocks import BlockKind, BlockTable

PARTIAL_COST = 1.5
"""Cost of a masked block relative to an unmasked one. Estimated, not measured on a GPU: the mask costs about half a
block's matrix products in integer arithmetic. `benchmarks/attention.py` prints the fitted figure."""

UNIT_COST = 1.0
"""Fixed cost of a unit, in unmasked blocks: first loads and epilogue."""

MERGE_COST = 1.0
"""Cost of joining one partial result, in unmasked blocks."""

SMALLEST_PIECE_TOKENS = 4096
"""A piece of a split row visits at least this many tokens (Cornstarch, the thesis, 3.3.2.2)."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """Units of one kernel launch, longest first. All arrays are int32.

    `units[u] = (row block, first full, end full, end partial, slot)`: the unit visits the intervals
    `first full : end full` without masking, then `end full : end partial` with masking. `slot` is the index of its
    partial result, or -1 if the unit is the whole row. `intervals[i] = (first token, end token)` on the column side, in
    whole blocks: the last may reach beyond the tokens, and is then masked.
    `splits[s] = (row block, first slot, end slot)` lists the split rows; their slots are added up in that order. Rows
    that see nothing are units without intervals, so that every row is written.
    """

    units: NDArray[np.int32]
    intervals: NDArray[np.int32]
    splits: NDArray[np.int32]
    row_block: int

    @property
    def num_units(self) -> int:
        return self.units.shape[0]

    @property
    def num_slots(self) -> int:
        return int(self.splits[-1, 2]) if self.splits.size else 0


def work_list(
    table: BlockTable,
    copies: int,
    processors: int,
    *,
    copy_cost: int = 1,
    smallest_piece_tokens: int = SMALLEST_PIECE_TOKENS,
) -> WorkList:
    """Return the units of a launch that runs every row of `table` `copies` times (once per head) on `processors`.

    `copy_cost` is the work of one copy in visits of a row: in the gradient of keys and values one copy serves a whole
    group of query heads.
    """
    rows, starts, ends, partial = _masked_tail(table)
    weight = np.where(partial, PARTIAL_COST, 1.0) * (ends - starts) * copy_cost
    row_weight = np.bincount(rows, weights=weight, minlength=table.num_rows) + UNIT_COST
    piece = max(1, smallest_piece_tokens // table.column_block) * copy_cost
    pieces = _choose_pieces(row_weight, copies, processors, piece)

    order = np.lexsort((starts, partial, rows))
    rows, starts, ends, partial, weight = (x[order] for x in (rows, starts, ends, partial, weight))
    if (pieces > 1).any():
        rows, starts, ends, partial, unit_piece = _cut(
            rows, starts, ends, partial, weight, row_weight, pieces, copy_cost
        )
    else:
        unit_piece = np.zeros_like(rows)

    first_unit = np.cumsum(pieces) - pieces
    unit_of = first_unit[rows] + unit_piece
    num_units = int(pieces.sum())
    full = np.bincount(unit_of, weights=~partial, minlength=num_units).astype(np.int64)
    masked = np.bincount(unit_of, weights=partial, minlength=num_units).astype(np.int64)
    weight = np.where(partial, PARTIAL_COST, 1.0) * (ends - starts)
    unit_weight = np.bincount(unit_of, weights=weight, minlength=num_units)
    end = np.cumsum(full + masked)

    unit_row = np.repeat(np.arange(table.num_rows), pieces)
    is_piece = np.repeat(pieces > 1, pieces)
    slot = np.where(is_piece, np.cumsum(is_piece) - 1, -1)
    longest_first = np.argsort(-unit_weight, kind="stable")
    units = np.stack([unit_row, end - full - masked, end - masked, end, slot], axis=1)[longest_first]

    cut_rows = np.flatnonzero(pieces > 1)
    last_slot = np.cumsum(pieces[cut_rows])
    splits = np.stack([cut_rows, last_slot - pieces[cut_rows], last_slot], axis=1)
    intervals = np.stack([starts, ends], axis=1) * table.column_block
    return WorkList(
        units=np.ascontiguousarray(units, dtype=np.int32),
        intervals=np.ascontiguousarray(intervals, dtype=np.int32).reshape(-1, 2),
        splits=np.ascontiguousarray(splits, dtype=np.int32).reshape(-1, 3),
        row_block=table.row_block,
    )


def _masked_tail(table: BlockTable) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """Return row, first block, end block and masking of every interval; a short last column block is always masked.

    A table calls a short last block full if the existing tokens are visible. A kernel that loads whole blocks must mask
    the rest.
    """
    rows = np.repeat(np.arange(table.num_rows), np.diff(table.offsets))
    starts = table.start.astype(np.int64)
    ends = starts + table.length
    partial = table.kind == BlockKind.PARTIAL
    if table.column_tokens % table.column_block:
        last = table.num_columns - 1
        reaches = np.flatnonzero((ends == table.num_columns) & ~partial)
        ends = ends.copy()
        ends[reaches] = last
        rows = np.concatenate([rows, rows[reaches]])
        starts = np.concatenate([starts, np.full(reaches.size, last)])
        ends = np.concatenate([ends, np.full(reaches.size, last + 1)])
        partial = np.concatenate([partial, np.ones(reaches.size, dtype=bool)])
        some = ends > starts
        rows, starts, ends, partial = rows[some], starts[some], ends[some], partial[some]
    return rows, starts, ends, partial


def _choose_pieces(row_weight: NDArray, copies: int, processors: int, piece: float) -> NDArray[np.int64]:
    """Return the number of units of each row, int64 `[rows]`: the choice with the shorter simulated launch."""
    whole = np.ones(row_weight.size, dtype=np.int64)
    if not row_weight.size:
        return whole
    ideal = row_weight.sum() * copies / processors
    if row_weight.max() <= ideal / 2:
        return whole
    target = max(ideal / 2, piece)
    cut = np.maximum(np.minimum(np.ceil(row_weight / target), row_weight // piece), 1).astype(np.int64)
    if (cut == 1).all():
        return whole

    pieces = np.repeat(row_weight / cut, cut) + UNIT_COST * np.repeat(cut > 1, cut)
    merging = MERGE_COST * (cut[cut > 1].sum() * copies / processors + 1)
    split = greedy_makespan(pieces, copies, processors) + merging
    return cut if split < greedy_makespan(row_weight, copies, processors) else whole


def greedy_makespan(weights: NDArray, copies: int, processors: int) -> float:
    """Return the finish time of the last of `processors` if `copies` of each unit, longest first, go to the first free
    one. Units under a twentieth of a processor's average load are treated as perfectly divisible."""
    share = float(weights.sum()) * copies / processors
    loads = [0.0] * processors
    for weight in np.sort(weights[weights > share / 20])[::-1].tolist():
        for _ in range(copies):
            heapq.heapreplace(loads, loads[0] + weight)
    return max(share, max(loads))


def _cut(
    rows: NDArray,
    starts: NDArray,
    ends: NDArray,
    partial: NDArray,
    weight: NDArray,
    row_weight: NDArray,
    pieces: NDArray,
    copy_cost: int,
) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
    """Split intervals of rows with several pieces at block borders, such that a row's pieces weigh about the same.

    Returns each interval's row, first and end block, whether it is masked, and the number of its piece within the row.
    """
    out: list[tuple[int, int, int, bool, int]] = []
    keep = pieces[rows] == 1
    first_of_row = np.searchsorted(rows, np.flatnonzero(pieces > 1))
    end_of_row = np.searchsorted(rows, np.flatnonzero(pieces > 1), side="right")
    for first, end in zip(first_of_row.tolist(), end_of_row.tolist()):
        row = int(rows[first])
        share = (row_weight[row] - UNIT_COST) / pieces[row]
        done, piece = 0.0, 0
        for i in range(first, end):
            cost = (PARTIAL_COST if partial[i] else 1.0) * copy_cost
            at, stop = int(starts[i]), int(ends[i])
            while at < stop:
                last = piece == pieces[row] - 1
                room = stop - at if last else round(((piece + 1) * share - done) / cost)
                if room <= 0:
                    piece += 1
                    continue
                take = min(room, stop - at)
                out.append((row, at, at + take, bool(partial[i]), piece))
                at += take
                done += take * cost
    cut = np.array(out, dtype=np.int64).reshape(-1, 5)
    rows = np.concatenate([rows[keep], cut[:, 0]])
    number = np.concatenate([np.zeros(int(keep.sum()), dtype=np.int64), cut[:, 4]])
    starts = np.concatenate([starts[keep], cut[:, 1]])
    ends = np.concatenate([ends[keep], cut[:, 2]])
    partial = np.concatenate([partial[keep], cut[:, 3].astype(bool)])
    order = np.lexsort((starts, partial, number, rows))
    return rows[order], starts[order], ends[order], partial[order], number[order]
