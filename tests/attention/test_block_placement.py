"""Blocks are placed so that ranks finish together, within limits, and the same way everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases.mask_strategies import masks
from dilatant.attention.masks import lpt, packing
from dilatant.attention.masks.blocks import block_samples, block_table, block_workloads
from dilatant.attention.masks.packing import RowLayout
from dilatant.attention.masks.placement import (
    POLICIES,
    ROW_POLICIES,
    PlacementError,
    needed_keys,
    place_blocks,
    place_row,
)
from oracles.dense_mask import word_matrix
from oracles.placements import least_maximum

# Compiled code is loaded on first use, which no deadline should count.
checked = settings(deadline=None, print_blob=True, max_examples=20)

integers = st.lists(st.integers(0, 1000), max_size=40)
workloads = integers | st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=40)
ranks = st.integers(1, 9)


def place(work, num_ranks, policy, **options):
    return place_blocks(work, num_ranks, policy, documents=np.arange(len(work)) // 5, **options)


@pytest.mark.parametrize("policy", POLICIES)
@checked
@given(work=workloads, num_ranks=ranks)
@example(work=[], num_ranks=3)
@example(work=[0, 0, 0], num_ranks=2)
@example(
    work=[100] + [1] * 13, num_ranks=4
)  # three light ranks would take four each and leave two for the first
def test_every_block_has_a_rank_and_ranks_have_equal_counts(policy, work, num_ranks):
    placement = place(work, num_ranks, policy)
    assert placement.rank_of_block.shape == (len(work),)
    assert ((placement.rank_of_block >= 0) & (placement.rank_of_block < num_ranks)).all()
    counts = [int((placement.rank_of_block == rank).sum()) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert placement.counts.tolist() == counts


@pytest.mark.parametrize("policy", POLICIES)
@checked
@given(work=st.lists(st.integers(0, 1000), max_size=14), num_ranks=ranks)
def test_loads_are_sums_of_workloads_and_none_beats_the_bound(policy, work, num_ranks):
    placement = place(work, num_ranks, policy)
    loads = [sum(w for w, r in zip(work, placement.rank_of_block) if r == rank) for rank in range(num_ranks)]
    assert placement.loads.tolist() == loads
    assert placement.bound >= max([0, -(-sum(work) // num_ranks), *work])
    assert max(loads) >= placement.bound
    assert placement.gap == pytest.approx(max(loads) / placement.bound - 1 if placement.bound else 0)
    if sum(work):
        assert placement.imbalance == pytest.approx(max(loads) * num_ranks / sum(work))


@checked
@given(work=st.lists(st.integers(1, 1000), min_size=1, max_size=9), num_ranks=st.integers(1, 4))
def test_longest_first_is_near_the_best(work, num_ranks):
    best = least_maximum(work, num_ranks, equal_counts=False)
    free = place_blocks(work, num_ranks, "lpt", equal_counts=False)
    assert best <= free.loads.max()
    assert 3 * num_ranks * free.loads.max() <= (4 * num_ranks - 1) * best  # Graham: 4/3 - 1/3G
    capped = least_maximum(work, num_ranks, equal_counts=True)
    assert capped <= place_blocks(work, num_ranks, "lpt").loads.max()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "embedded", "packed"])
@pytest.mark.parametrize("num_ranks", [8, 64, 256])
def test_a_million_tokens_are_even_on_any_mask(kind, num_ranks):
    rng = np.random.default_rng(11)
    segments = [(("text", "vision")[i % 2], int(rng.integers(64, 4096))) for i in range(500)]
    samples = {
        "causal": [[("text", 1 << 20)]],
        "embedded": [segments],
        "packed": [segments[i : i + 20] for i in range(0, 500, 20)],
    }[kind]
    work = block_workloads(packing.embedded(RowLayout.of_samples(samples)))
    placement = place_blocks(work, num_ranks)
    assert placement.gap < 1e-4
    assert np.ptp(placement.counts) <= 1


@checked
@given(work=st.lists(st.integers(0, 1000), min_size=1, max_size=60), num_ranks=ranks)
def test_swaps_only_ever_help(work, num_ranks):
    work = np.array(work)
    order = lpt.descending(work)
    before = lpt.assign_longest_first(work, order, num_ranks, 4, True)
    after = before.copy()
    lpt.swap_to_even(work, order, after, num_ranks, 0, 10**6)
    loads = [np.bincount(rank_of, weights=work, minlength=num_ranks) for rank_of in (before, after)]
    assert loads[1].max() <= loads[0].max()
    assert (np.bincount(before, minlength=num_ranks) == np.bincount(after, minlength=num_ranks)).all()
    # No single swap with the most loaded rank is left that would lower it.
    high = int(loads[1].argmax())
    for mine in np.flatnonzero(after == high):
        for other in np.flatnonzero(after != high):
            difference = work[mine] - work[other]
            assert difference <= 0 or loads[1][after[other]] + difference >= loads[1].max()


@checked
@given(work=st.lists(st.integers(0, 20), max_size=40), limit=st.integers(0, 60), seed=st.integers(0, 99))
def test_chunks_are_neighbours_of_one_document_within_the_limit(work, limit, seed):
    work = np.array(work, dtype=np.int64)
    documents = np.sort(np.random.default_rng(seed).integers(0, 4, work.size))
    chunk_of, chunk_work = lpt.cut_documents(work, documents, limit)
    assert (np.diff(chunk_of, prepend=-1) <= 1).all() or not work.size
    for chunk, total in enumerate(chunk_work):
        members = np.flatnonzero(chunk_of == chunk)
        assert total == work[members].sum()
        assert len(set(documents[members])) == 1
        assert total <= limit or members.size == 1
        following = members[-1] + 1
        if following < work.size and documents[following] == documents[members[0]]:
            assert total + work[following] > limit


@pytest.mark.slow
def test_on_a_causal_mask_longest_first_and_zigzag_agree():
    work = block_workloads(packing.causal(RowLayout.of_lengths([1 << 16])))
    for num_ranks in (4, 8, 32):
        assert place_blocks(work, num_ranks).imbalance == pytest.approx(1)
        assert place_blocks(work, num_ranks, "zigzag").imbalance == pytest.approx(1)


@checked
@given(blocks=st.integers(0, 40), num_ranks=ranks)
def test_zigzag_and_contiguous_hold_stretches_of_the_row(blocks, num_ranks):
    zigzag = place_blocks(np.ones(blocks, int), num_ranks, "zigzag").rank_of_block
    seen = [rank for i, rank in enumerate(zigzag) if i == 0 or zigzag[i - 1] != rank]
    there = [rank for rank in range(num_ranks) if rank in zigzag]
    assert seen[: len(there)] == there
    back = [rank for rank in reversed(range(num_ranks)) if (zigzag == rank).sum() > 1]
    assert seen[len(there) :] == (back[1:] if back and back[0] == there[-1] else back)
    contiguous = place_blocks(np.ones(blocks, int), num_ranks, "contiguous").rank_of_block
    assert (np.diff(contiguous) >= 0).all()


def test_random_follows_its_seed():
    first, again, other = (
        place_blocks(np.arange(64), 4, "random", seed=seed).rank_of_block.tolist() for seed in (7, 7, 8)
    )
    assert first == again != other


@pytest.mark.parametrize("policy", POLICIES)
def test_all_processes_derive_the_same_placement(policy):
    program = (
        "import numpy as np; from dilatant.attention import place_blocks\n"
        "work = np.random.default_rng(1).integers(0, 9, 14) / 7\n"
        f"p = place_blocks(work, 3, {policy!r}, documents=np.arange(14) // 4)\n"
        "print(p.rank_of_block.tolist())"
    )
    here = place_blocks(
        np.random.default_rng(1).integers(0, 9, 14) / 7, 3, policy, documents=np.arange(14) // 4
    )
    source = str(Path(__file__).parents[2] / "src")
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == str(here.rank_of_block.tolist())


@checked
@given(
    tokens=st.integers(0, 100), block=st.integers(1, 9), num_ranks=st.integers(1, 5), seed=st.integers(0, 9)
)
def test_the_permutation_and_the_ranks_tokens_cover_the_row_once(tokens, block, num_ranks, seed):
    blocks = -(-tokens // block)
    placement = place_blocks(np.ones(blocks, int), num_ranks, "random", seed=seed)
    parts = [placement.tokens_of_rank(rank, tokens, block) for rank in range(num_ranks)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(tokens))
    for rank, part in enumerate(parts):
        assert (placement.rank_of_block[part // block] == rank).all()
        assert (np.diff(part) > 0).all()
    by_rank = np.concatenate([placement.blocks_of_rank(rank) for rank in range(num_ranks)])
    np.testing.assert_array_equal(placement.permutation, by_rank)
    with pytest.raises(PlacementError, match="were placed"):
        placement.tokens_of_rank(0, tokens + block, block)


@checked
@given(mask=masks(), block=st.integers(1, 9), num_ranks=st.integers(1, 4), seed=st.integers(0, 9))
def test_needed_keys_are_those_a_rank_sees(mask, block, num_ranks, seed):
    table = block_table(mask, block)
    placement = place_blocks(np.ones(table.num_rows, int), num_ranks, "random", seed=seed)
    dense = word_matrix(mask.fields, mask.fields, mask.positions, mask.positions, mask.window)
    needed = needed_keys(table, placement)
    for rank in range(num_ranks):
        seen = dense[placement.tokens_of_rank(rank, mask.num_tokens, block)].any(axis=0)
        expected = [bool(seen[at : at + block].any()) for at in range(0, mask.num_tokens, block)]
        assert needed[rank].tolist() == expected


def test_document_affinity_spares_most_keys_and_stays_even():
    rng = np.random.default_rng(2)
    mask = packing.document_causal(RowLayout.of_lengths(rng.integers(1000, 30000, 20)))
    table = block_table(mask)
    work = table.full_blocks + table.partial_blocks
    affine = place_blocks(work, 8, "document_affine", documents=block_samples(mask))
    spread = place_blocks(work, 8)
    assert needed_keys(table, affine).mean() < 0.5 * needed_keys(table, spread).mean()
    assert affine.gap < 1 / 32
    assert np.ptp(affine.counts) <= 1


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_row_is_placed_as_simply_as_its_mask_allows(num_ranks):
    def row(lengths):
        return packing.document_causal(RowLayout.of_lengths(lengths))

    # Short samples are even wherever they are, one long one is from both ends, and unlike ones need their blocks dealt.
    size = 128 * 32
    cases = {"contiguous": [64] * (num_ranks * size // 64), "zigzag": [num_ranks * size]}
    for policy, lengths in cases.items():
        found, named = (place_row(row(lengths), num_ranks, each).placement for each in ("auto", policy))
        assert (found.rank_of_block == named.rank_of_block).all()
    rng = np.random.default_rng(0)
    for _ in range(10):
        mask = row(rng.integers(1, 6000, 12))
        best = min(place_row(mask, num_ranks, policy).placement.loads.max() for policy in ROW_POLICIES)
        assert place_row(mask, num_ranks).placement.loads.max() <= 1.01 * best


def test_document_chunks_go_to_the_least_loaded_rank():
    """List scheduling (Graham): no rank is above the mean by more than one chunk."""
    rng = np.random.default_rng(3)
    documents = np.repeat(np.arange(30), rng.integers(1, 12, 30))
    work = rng.integers(1, 100, documents.size)
    for num_ranks in (2, 5, 8):
        placed = place_blocks(work, num_ranks, "document_affine", documents=documents, equal_counts=False)
        largest_chunk = max(work.sum() / num_ranks, work.max())
        assert placed.loads.max() <= work.sum() / num_ranks + largest_chunk * (1 - 1 / num_ranks)
        assert placed.loads.min() > 0


@checked
@given(mask=masks(), block=st.integers(1, 9))
def test_a_block_belongs_to_the_sample_of_its_first_token(mask, block):
    samples = (mask.fields[::block] >> 48) & 0xFFF
    np.testing.assert_array_equal(block_samples(mask, block), samples)


def test_workloads_that_cannot_be_placed_are_named():
    with pytest.raises(PlacementError, match="unknown placement policy 'best'; known are lpt, zigzag"):
        place_blocks([1, 2], 2, "best")
    with pytest.raises(PlacementError, match="at least one rank"):
        place_blocks([1, 2], 0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PlacementError, match="of block 1 is not a finite number"):
            place_blocks([3.0, bad, 4.0], 2)
    with pytest.raises(PlacementError, match="needs `documents`"):
        place_blocks([1, 2], 2, "document_affine")
    with pytest.raises(PlacementError, match="must be a vector"):
        place_blocks([[1, 2]], 2)


def test_loads_beyond_53_bits_are_exact():
    work = [2**60, 2**60 + 1, 3]
    placement = place_blocks(work, 2)
    assert sorted(placement.loads.tolist()) == sorted(
        sum(w for w, r in zip(work, placement.rank_of_block) if r == rank) for rank in range(2)
    )


def test_planning_imports_no_torch():
    program = (
        "import sys; from dilatant.attention import AttentionMask, block_workloads, place_blocks, visible\n"
        "import dilatant.attention.masks.lpt, dilatant.attention.masks.summary, dilatant.attention.masks.sweep\n"
        "assert 'torch' not in sys.modules"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"], check=True
    )
