"""Blocks are placed so that ranks finish together within limits, and every rank computes the same placement."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases.attention import mask_kinds
from dilatant.attention.masks import lpt, packing
from dilatant.attention.masks.blocks import block_workloads
from dilatant.attention.masks.packing import RowLayout
from dilatant.attention.masks.placement import POLICIES, PlacementError, place_blocks, place_row
from oracles.placements import least_maximum

# Compiled code is loaded on first use, which no deadline should count.
checked = settings(deadline=None, print_blob=True, max_examples=10)

integers = st.lists(st.integers(0, 1000), max_size=40)
workloads = integers | st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=40)
ranks = st.integers(1, 9)


@pytest.mark.parametrize("policy", POLICIES)
@checked
@given(work=workloads, num_ranks=ranks)
@example(work=[], num_ranks=3)
@example(work=[0, 0, 0], num_ranks=2)
@example(work=[100] + [1] * 13, num_ranks=4)  # three light ranks would take four each and leave two for the first
def test_every_block_has_a_rank_and_ranks_have_equal_counts(policy, work, num_ranks):
    placement = place_blocks(work, num_ranks, policy)
    assert placement.rank_of_block.shape == (len(work),)
    assert ((placement.rank_of_block >= 0) & (placement.rank_of_block < num_ranks)).all()
    counts = [int((placement.rank_of_block == rank).sum()) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert placement.counts.tolist() == counts


@pytest.mark.parametrize("policy", POLICIES)
@checked
@given(work=st.lists(st.integers(0, 1000), max_size=14), num_ranks=ranks)
def test_loads_are_sums_of_workloads_and_none_beats_the_bound(policy, work, num_ranks):
    placement = place_blocks(work, num_ranks, policy)
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
    best, load = least_maximum(work, num_ranks, equal_counts=True), place_blocks(work, num_ranks).loads.max()
    assert best <= load
    assert 3 * num_ranks * load <= (4 * num_ranks - 1) * best  # Graham's bound without equal counts: 4/3 - 1/3G


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
    work = block_workloads(mask_kinds.embedded(RowLayout.of_samples(samples)))
    placement = place_blocks(work, num_ranks)
    assert placement.gap < 1e-4
    assert np.ptp(placement.counts) <= 1


@checked
@given(work=st.lists(st.integers(0, 1000), min_size=1, max_size=60), num_ranks=ranks)
def test_swaps_only_ever_help(work, num_ranks):
    work = np.array(work)
    order = lpt.descending(work)
    before = lpt.assign_longest_first(work, order, num_ranks, 4)
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


@pytest.mark.slow
def test_on_a_causal_mask_longest_first_and_zigzag_agree():
    work = block_workloads(mask_kinds.causal(RowLayout.of_lengths([1 << 16])))
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


def test_all_processes_derive_the_same_placement():
    program = (
        "import numpy as np; from dilatant.attention import place_blocks\n"
        "work = np.random.default_rng(1).integers(0, 9, 14) / 7\n"
        f"print([place_blocks(work, 3, policy).rank_of_block.tolist() for policy in {POLICIES!r}])"
    )
    work = np.random.default_rng(1).integers(0, 9, 14) / 7
    here = [place_blocks(work, 3, policy).rank_of_block.tolist() for policy in POLICIES]
    source = str(Path(__file__).parents[2] / "src")
    out = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == str(here)


@checked
@given(tokens=st.integers(0, 100), block=st.integers(1, 9), num_ranks=st.integers(1, 5), seed=st.integers(0, 9))
def test_the_permutation_and_the_ranks_tokens_cover_the_row_once(tokens, block, num_ranks, seed):
    blocks = -(-tokens // block)
    placement = place_blocks(np.random.default_rng(seed).integers(0, 9, blocks), num_ranks)
    parts = [placement.tokens_of_rank(rank, tokens, block) for rank in range(num_ranks)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(tokens))
    for rank, part in enumerate(parts):
        assert (placement.rank_of_block[part // block] == rank).all()
        assert (np.diff(part) > 0).all()
    with pytest.raises(PlacementError, match="were placed"):
        placement.tokens_of_rank(0, tokens + block, block)


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
        best = min(place_row(mask, num_ranks, policy).placement.loads.max() for policy in POLICIES)
        assert place_row(mask, num_ranks).placement.loads.max() <= 1.01 * best


def test_workloads_that_cannot_be_placed_are_named():
    with pytest.raises(PlacementError, match="unknown placement policy 'best'; known are contiguous, zigzag"):
        place_blocks([1, 2], 2, "best")
    with pytest.raises(PlacementError, match="at least one rank"):
        place_blocks([1, 2], 0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PlacementError, match="of block 1 is not a finite number"):
            place_blocks([3.0, bad, 4.0], 2)
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
        "import dilatant.attention.masks.lpt, dilatant.attention.masks.sweep\n"
        "assert 'torch' not in sys.modules"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"], check=True)
