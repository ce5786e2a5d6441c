"""Block tables hold exactly the blocks of the dense mask, whatever the mask, the blocks or the order of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention import mask_kinds
from cases.attention.mask_strategies import masks, ragged_masks, rows
from dilatant.attention.masks.blocks import BlockKind, BlockTable, block_table, block_workloads
from dilatant.attention.masks.mask import AttentionMask, pack_fields
from dilatant.attention.masks.packing import RowLayout
from oracles import dense_mask as oracle

# Compiled code is loaded on first use, which no deadline should count.
checked = settings(deadline=None, print_blob=True, max_examples=15)

any_mask = masks() | ragged_masks()
blocks = st.integers(1, 9) | st.sampled_from([16, 32])


def dense(queries: AttentionMask, keys: AttentionMask) -> np.ndarray:
    return oracle.word_matrix(queries.fields, keys.fields, queries.positions, keys.positions, queries.window)


def written_out(table: BlockTable) -> np.ndarray:
    """The table as one kind per pair of blocks, checking that intervals are sorted, disjoint and inside."""
    kinds = np.zeros((table.num_rows, table.num_columns), dtype=int)
    for row in range(table.num_rows):
        done = 0
        for i in range(table.offsets[row], table.offsets[row + 1]):
            end = table.start[i] + table.length[i]
            assert done <= table.start[i] < end <= table.num_columns
            kinds[row, table.start[i] : end] = table.kind[i]
            done = end
    return kinds


def assert_sound(found: np.ndarray, true: np.ndarray) -> None:
    assert (true[found == BlockKind.EMPTY] == BlockKind.EMPTY).all()
    assert (true[found == BlockKind.FULL] == BlockKind.FULL).all()


@checked
@given(mask=any_mask, block=blocks, key_block=blocks)
def test_tables_are_the_blocks_of_the_dense_mask(mask, block, key_block):
    table = block_table(mask, block, key_block)
    assert table.exact
    true = oracle.block_kinds(dense(mask, mask), block, key_block)
    np.testing.assert_array_equal(written_out(table), true)
    np.testing.assert_array_equal(table.full_blocks, (true == 2).sum(1))
    np.testing.assert_array_equal(table.partial_blocks, (true == 1).sum(1))


@checked
@given(mask=any_mask, block=blocks, key_block=blocks)
def test_the_transposed_table_is_the_table_by_columns(mask, block, key_block):
    table = block_table(mask, block, key_block)
    turned = table.transposed()
    assert turned.exact
    np.testing.assert_array_equal(written_out(turned), written_out(table).T)
    np.testing.assert_array_equal(written_out(turned.transposed()), written_out(table))


@checked
@given(mask=any_mask, block=blocks, key_block=blocks, seed=st.integers(0, 2**32 - 1))
def test_a_rank_with_some_queries_has_their_part_of_the_mask(mask, block, key_block, seed):
    rng = np.random.default_rng(seed)
    order = rng.permutation(mask.num_tokens)[: rng.integers(0, mask.num_tokens + 1)]
    queries = mask.take(order)
    table = block_table(queries, block, key_block, keys=mask)
    true = oracle.block_kinds(dense(queries, mask), block, key_block)
    np.testing.assert_array_equal(written_out(table), true)
    np.testing.assert_array_equal(written_out(table.transposed()), true.T)


@checked
@given(mask=any_mask, block=blocks, key_block=blocks)
def test_workloads_count_the_blocks_to_visit(mask, block, key_block):
    true = oracle.block_kinds(dense(mask, mask), block, key_block)
    work = block_workloads(mask, block, key_block)
    assert work.dtype == np.int64
    np.testing.assert_array_equal(work, (true > 0).sum(1))


@checked
@given(mask=any_mask, block=blocks, key_block=blocks, most=st.integers(3, 6))
def test_joined_intervals_hide_nothing_and_stay_few(mask, block, key_block, most):
    table = block_table(mask, block, key_block, max_intervals=most)
    turned = table.transposed(max_intervals=most)
    assert np.diff(table.offsets, prepend=0).max(initial=0) <= most
    assert np.diff(turned.offsets, prepend=0).max(initial=0) <= most
    true = oracle.block_kinds(dense(mask, mask), block, key_block)
    assert_sound(written_out(table), true)
    assert_sound(written_out(turned), true.T)
    if table.exact:
        np.testing.assert_array_equal(written_out(table), true)


def test_a_mask_like_noise_visits_all_blocks_of_its_samples():
    rng = np.random.default_rng(0)
    tokens = 12000
    mask = AttentionMask.from_tokens(
        pack_fields(
            1 << rng.integers(0, 3, tokens),
            rng.integers(0, 8, tokens),
            sample=np.arange(tokens) // 5000,
            causal=rng.integers(0, 2, tokens),
        )
    )
    table = block_table(mask)
    assert not table.exact
    found = written_out(table)
    assert (found == BlockKind.EMPTY).any()
    for query in rng.integers(0, tokens, 10):
        sees = dense(mask.take([query]), mask)[0]
        for column in range(table.num_columns):
            part = sees[column * 128 : (column + 1) * 128]
            kind = found[query // 128, column]
            assert not (part.any() and kind == BlockKind.EMPTY)
            assert not (not part.all() and kind == BlockKind.FULL)
    np.testing.assert_array_equal(block_workloads(mask), table.full_blocks + table.partial_blocks)


MEASURE = """
import json, sys, tracemalloc
from numba.core.runtime import _nrt_python
_nrt_python.memsys_use_cpython_allocator()  # else what compiled code allocates goes unseen
sys.path[:0] = sys.argv[1:]
from cases.attention.mask_strategies import BUILDERS
from dilatant.attention.masks.blocks import block_table
from dilatant.attention.masks.packing import RowLayout

def peak(kind, samples):
    sample = [("vision", 1024), ("text", 300), ("vision", 700), ("text", 24)] * 4
    if kind == "prepended":
        sample.sort(reverse=True)
    mask = BUILDERS[kind](RowLayout.of_samples([sample] * samples))
    tracemalloc.start()
    table = block_table(mask)
    turned = table.transposed()
    bytes_ = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert table.exact and turned.exact
    return bytes_

print(json.dumps({kind: [peak(kind, samples) for samples in (1, 4, 8)] for kind in BUILDERS}))
"""


def test_tables_take_memory_in_proportion_to_tokens():
    # At 64k tokens a dense mask takes 4 GiB. Everything alive at once, both tables included, stays under 16 bytes a
    # token, and grows from 32k to 64k tokens by no more than the tokens do; a tenth is left for array growth.
    tests = Path(__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tests), str(tests.parent / "src")],
        check=True,
        capture_output=True,
        text=True,
    )
    for kind, (_, half, whole) in json.loads(out.stdout).items():
        assert whole < 16 * 65536, kind
        assert whole < 2.1 * half, kind


@checked
@given(samples=rows)
def test_an_empty_row_or_a_rank_without_blocks_is_fine(samples):
    keys = mask_kinds.embedded(RowLayout.of_samples(samples))
    nobody = AttentionMask.from_tokens([])
    assert block_table(nobody, 8, keys=keys).num_rows == 0
    assert block_workloads(nobody, 8, keys=keys).size == 0
    empty = block_table(keys, 8, keys=nobody)
    assert empty.start.size == 0
    assert empty.transposed().num_rows == 0
