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
block's matrix products in integer arithmetic. `benchmarks/attention/attention.py` prints the fitted figure."""

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
    found = _masked_tail(table)
    weight = _weights(found) * copy_cost
    row_weight = np.bincount(found[:, 0], weights=weight, minlength=table.num_rows) + UNIT_COST
    piece = max(1, smallest_piece_tokens // table.column_block) * copy_cost
    pieces = _choose_pieces(row_weight, copies, processors, piece)

    found = found[np.lexsort((found[:, 1], found[:, 3], found[:, 0]))]
    unit_piece = np.zeros(len(found), dtype=np.int64)
    if (pieces > 1).any():
        found, unit_piece = _cut(found, row_weight, pieces, copy_cost)

    first_unit = np.cumsum(pieces) - pieces
    unit_of = first_unit[found[:, 0]] + unit_piece
    num_units = int(pieces.sum())
    masked = np.bincount(unit_of, weights=found[:, 3], minlength=num_units).astype(np.int64)
    full = np.bincount(unit_of, minlength=num_units) - masked
    unit_weight = np.bincount(unit_of, weights=_weights(found), minlength=num_units)
    end = np.cumsum(full + masked)

    unit_row = np.repeat(np.arange(table.num_rows), pieces)
    is_piece = np.repeat(pieces > 1, pieces)
    slot = np.where(is_piece, np.cumsum(is_piece) - 1, -1)
    longest_first = np.argsort(-unit_weight, kind="stable")
    units = np.stack([unit_row, end - full - masked, end - masked, end, slot], axis=1)[longest_first]

    cut_rows = np.flatnonzero(pieces > 1)
    last_slot = np.cumsum(pieces[cut_rows])
    splits = np.stack([cut_rows, last_slot - pieces[cut_rows], last_slot], axis=1)
    intervals = found[:, 1:3] * table.column_block
    return WorkList(
        units=np.ascontiguousarray(units, dtype=np.int32),
        intervals=np.ascontiguousarray(intervals, dtype=np.int32).reshape(-1, 2),
        splits=np.ascontiguousarray(splits, dtype=np.int32).reshape(-1, 3),
        row_block=table.row_block,
    )


def _weights(found: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the cost of each interval of `_masked_tail`, in unmasked blocks."""
    weights: NDArray[np.float64] = np.where(found[:, 3], PARTIAL_COST, 1.0) * (found[:, 2] - found[:, 1])
    return weights


def _masked_tail(table: BlockTable) -> NDArray[np.int64]:
    """Return row, first block, end block and masking of every interval, `[intervals, 4]`; a short last column block is
    always masked.

    A table calls a short last block full if the existing tokens are visible. A kernel that loads whole blocks must mask
    the rest.
    """
    rows = np.repeat(np.arange(table.num_rows), np.diff(table.offsets))
    starts = table.start.astype(np.int64)
    found = np.stack([rows, starts, starts + table.length, table.kind == BlockKind.PARTIAL], axis=1)
    if table.column_tokens % table.column_block:
        last = table.num_columns - 1
        reaches = (found[:, 2] == table.num_columns) & (found[:, 3] == 0)
        tails = found[reaches]
        tails[:, 1:] = last, last + 1, True
        found[reaches, 2] = last
        found = np.concatenate([found[found[:, 2] > found[:, 1]], tails])
    return found


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
    found: NDArray[np.int64], row_weight: NDArray, pieces: NDArray, copy_cost: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split intervals of rows with several pieces at block borders, such that a row's pieces weigh about the same.

    Returns the intervals, as in `_masked_tail`, and the number of the piece of each within its row.
    """
    out: list[tuple[int, int, int, int, int]] = []
    cut_rows = np.flatnonzero(pieces > 1)
    first_of_row = np.searchsorted(found[:, 0], cut_rows)
    end_of_row = np.searchsorted(found[:, 0], cut_rows, side="right")
    for row, first, end in zip(cut_rows.tolist(), first_of_row.tolist(), end_of_row.tolist()):
        share = (row_weight[row] - UNIT_COST) / pieces[row]
        done, piece = 0.0, 0
        for _, at, stop, masked in found[first:end].tolist():
            cost = (PARTIAL_COST if masked else 1.0) * copy_cost
            while at < stop:
                last = piece == pieces[row] - 1
                room = stop - at if last else round(((piece + 1) * share - done) / cost)
                if room <= 0:
                    piece += 1
                    continue
                take = min(room, stop - at)
                out.append((row, at, at + take, masked, piece))
                at += take
                done += take * cost
    whole = found[pieces[found[:, 0]] == 1]
    both = np.concatenate([np.pad(whole, ((0, 0), (0, 1))), np.array(out, dtype=np.int64).reshape(-1, 5)])
    both = both[np.lexsort((both[:, 1], both[:, 3], both[:, 4], both[:, 0]))]
    return both[:, :4], both[:, 4]
