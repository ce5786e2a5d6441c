"""Work lists visit what the block table says, once, and cut rows where that shortens the launch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention.mask_kinds import causal, embedded
from cases.attention.mask_strategies import masks, ragged_masks
from dilatant.attention.masks.blocks import BlockTable, block_table
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout
from dilatant.attention.masks.work import WorkList, greedy_makespan, work_list
from oracles.dense_mask import block_kinds, word_matrix


def visits(work: WorkList, table: BlockTable) -> np.ndarray:
    """How often each block is visited as full (2) and as partial (1): int `[kinds, rows, columns]`."""
    found = np.zeros((3, table.num_rows, table.num_columns), dtype=int)
    for row, first, end_full, end_partial, _ in work.units.tolist():
        for kind, low, high in ((2, first, end_full), (1, end_full, end_partial)):
            for start, end in work.intervals[low:high].tolist():
                assert start % table.column_block == end % table.column_block == 0
                assert start < end
                found[kind, row, start // table.column_block : end // table.column_block] += 1
    return found


@given(
    mask=masks() | ragged_masks(),
    copies=st.integers(1, 4),
    processors=st.sampled_from([1, 8, 64]),
    smallest=st.sampled_from([4, 16]),
    transposed=st.booleans(),
)
@settings(max_examples=80, deadline=None, print_blob=True)
def test_each_block_is_visited_once_and_masked_where_it_must_be(
    mask: AttentionMask, copies: int, processors: int, smallest: int, transposed: bool
) -> None:
    if not mask.num_tokens:
        return
    dense = word_matrix(mask.fields, mask.fields, mask.positions, mask.positions, mask.window)
    table = block_table(mask, 8, 4)
    if transposed:
        table, dense = table.transposed(), dense.T
    work = work_list(table, copies, processors, smallest_piece_tokens=smallest)
    found = visits(work, table)
    kinds = block_kinds(dense, table.row_block, table.column_block)
    assert (found[2][kinds != 2] == 0).all(), "a block with a hidden pair would not be masked"
    assert (found[1:].sum(0)[kinds > 0] == 1).all(), "a visible block is not visited exactly once"
    if table.column_tokens % table.column_block:
        assert (found[2][:, -1] == 0).all(), "the short last block would be read beyond its tokens"


@given(mask=masks(), processors=st.sampled_from([1, 16, 128]))
@settings(max_examples=40, deadline=None, print_blob=True)
def test_rows_are_written_once_and_cut_pieces_fill_all_slots(mask: AttentionMask, processors: int) -> None:
    table = block_table(mask, 4)
    work = work_list(table, 1, processors, smallest_piece_tokens=4)
    whole = work.units[work.units[:, 4] < 0, 0]
    cut = work.splits[:, 0]
    assert sorted([*whole.tolist(), *cut.tolist()]) == list(range(table.num_rows))
    pieces = work.units[work.units[:, 4] >= 0]
    assert sorted(pieces[:, 4].tolist()) == list(range(work.num_slots))
    for row, first, end in work.splits.tolist():
        slots = pieces[pieces[:, 0] == row, 4]
        assert sorted(slots.tolist()) == list(range(first, end))
        assert end - first > 1


def test_units_come_longest_first() -> None:
    table = block_table(causal(RowLayout.of_lengths([4096])))
    units = work_list(table, 32, 132).units
    assert units[:, 0].tolist() == list(range(31, -1, -1))


@pytest.mark.parametrize(
    ("tokens", "heads", "cut"),
    [
        (65536, 32, False),  # thousands of units: their order alone balances them
        (8192, 4, False),  # LPT order reaches the mean load; cutting would add merges for nothing
        (8192, 1, True),  # 64 rows for 132 processors: the longest would run alone
    ],
)
def test_rows_are_cut_only_where_it_shortens_the_launch(tokens: int, heads: int, cut: bool) -> None:
    table = block_table(causal(RowLayout.of_lengths([tokens])))
    assert (work_list(table, heads, 132).num_slots > 0) == cut


def test_an_embedded_context_parallel_share_is_balanced() -> None:
    """One KV head group of a rank of eight: long text rows would keep a few processors busy alone."""
    segments = [("text", 800), ("image", 3000)] * 17
    mask = embedded(RowLayout.of_samples([segments]))
    tokens = np.arange(mask.num_tokens)
    share = block_table(mask.take(tokens[tokens // 128 % 8 == 0]), keys=mask)
    work = work_list(share, 4, 132)
    assert work.num_slots > 0
    lengths = np.diff(work.intervals, axis=1)[:, 0] / 128
    weights = np.array([lengths[first:end].sum() for _, first, _, end, _ in work.units.tolist()])
    rows = (share.full_blocks + share.partial_blocks).astype(float)
    mean = rows.sum() * 4 / 132
    # Pieces are at least 32 blocks, so a processor may hold one piece more than the mean; whole rows are far above.
    assert greedy_makespan(weights, 4, 132) < mean + 32
    assert greedy_makespan(rows, 4, 132) > 1.5 * mean


def test_pieces_of_a_row_weigh_about_the_same() -> None:
    table = block_table(causal(RowLayout.of_lengths([32768])))
    work = work_list(table, 1, 132)
    lengths = np.diff(work.intervals, axis=1)[:, 0] / 128
    for row in work.splits[:, 0]:
        sizes = [lengths[first:end].sum() for r, first, _, end, _ in work.units.tolist() if r == row]
        assert max(sizes) - min(sizes) <= 2  # cut at block borders; a masked block counts half as much again
