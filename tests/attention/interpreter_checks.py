"""Checks of the Triton kernels under Triton's interpreter; `test_triton_interpreter.py` runs them in a separate
process, because the interpreter is chosen when the kernels are imported."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention import mask_kinds
from cases.attention.attention_cases import Case, assert_close_to_dense, make_case
from cases.attention.mask_strategies import MODALITIES, masks, ragged_masks
from dilatant.attention import attention
from dilatant.attention.context_parallel import ContextParallelRow, context_parallel_attention
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.scores import Gradients, Scores
from dilatant.attention.kernels.triton_kernel import kernel
from dilatant.attention.kernels.triton_tuning import Tile, Tuning
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout
from dilatant.attention.masks.placement import Placement
from harness.rank_pool import Among

torch.set_num_threads(1)

SQUARE = Tuning(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), block=32, processors=1)
OBLONG = Tuning(Tile(32, 64, 4, 1), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), block=64, processors=1)
SPLIT = Tuning(
    Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 32, 4, 1), block=32, processors=64, smallest_piece_tokens=32
)
DESCRIPTORS = Tuning(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), block=32, tma=True, processors=1)


def run(case: Case, tuning: Tuning) -> tuple[tuple[torch.Tensor, torch.Tensor], Gradients]:
    triton = kernel(tuning)
    plan, scores = AttentionPlan(case.mask, case.keys), Scores(case.scale, case.softcap)
    inputs = (case.query, case.key, case.value, case.sinks)
    output, logsumexp = triton.forward(*inputs, plan, scores)
    gradients = triton.backward(case.grad_output, *inputs, output, logsumexp, plan, scores)
    if tuning is SPLIT and case.mask.num_tokens > 96:
        work = [made for key, made in plan._remembered.items() if key[0] == "work"]
        assert any(made.num_slots for made in work), "no row was cut: the merge was not checked"
    return (output, logsumexp.t()), gradients


def check(case: Case, tuning: Tuning, tolerance: float) -> None:
    """Compare with dense attention; outputs and gradients of padding must be exactly zero."""
    results, gradients = run(case, tuning)
    padding = torch.tensor(case.mask.fields) == 0
    assert (results[0][padding] == 0).all()
    assert (results[1][padding] == -math.inf).all()
    for of_tokens, words in zip(gradients[:3], (case.mask, *(case.keys or case.mask,) * 2), strict=True):
        assert (of_tokens[torch.tensor(words.fields) == 0] == 0).all()
    assert_close_to_dense(results, [x for x in gradients if x is not None], case, tolerance)


@pytest.mark.slow
@given(
    mask=masks() | ragged_masks(),
    tuning=st.sampled_from([SQUARE, OBLONG, DESCRIPTORS]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    head_dim=st.sampled_from([16, 20]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=8, deadline=None, print_blob=True)
def test_drawn_rows_equal_dense_attention(
    mask: AttentionMask,
    tuning: Tuning,
    heads: tuple[int, int],
    head_dim: int,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    if mask.num_tokens:
        case = make_case(
            mask, query_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, softcap=softcap, sinks=sinks, seed=seed
        )
        # Some tens of float32 terms of order one, against float64.
        check(case, tuning, 2e-5)


LONG_ROW = RowLayout.of_samples(
    [
        [("text", 9), ("vision", 35), ("text", 5), ("audio", 8), ("text", 14)],
        [("vision", 13), ("vision", 3), ("text", 7), ("padding", 4)],
    ],
    MODALITIES,
)
SHORT_ROW = RowLayout.of_samples(
    [[("text", 4), ("vision", 11), ("text", 6)], [("vision", 9), ("text", 5), ("padding", 3)]], MODALITIES
)


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        pytest.param("causal", SPLIT, id="causal-split", marks=pytest.mark.slow),
        pytest.param("embedded", OBLONG, id="embedded-oblong", marks=pytest.mark.slow),
        pytest.param("embedded", SPLIT, id="embedded-split"),
        pytest.param("embedded", DESCRIPTORS, id="embedded-tma"),
        pytest.param("bidirectional_instances", SQUARE, id="bidirectional-square", marks=pytest.mark.slow),
    ],
)
def test_long_rows_of_mixed_blocks_equal_dense_attention(kind: str, tuning: Tuning) -> None:
    mask = mask_kinds.build_mask(LONG_ROW, kind)
    check(make_case(mask, query_heads=2, kv_heads=1, sinks=True), tuning, 2e-5)


def test_windows_reach_back_and_for_images_both_ways() -> None:
    mask = mask_kinds.build_mask(LONG_ROW, "embedded", window=20)
    check(make_case(mask, query_heads=2, kv_heads=2, head_dim=20, softcap=1.5), OBLONG, 2e-5)


def test_some_queries_against_all_keys_in_another_order() -> None:
    mask = mask_kinds.build_mask(LONG_ROW, "embedded")
    order = torch.randperm(mask.num_tokens, generator=torch.Generator().manual_seed(0)).numpy()
    check(make_case(mask.take(order[:40]), mask.take(order), query_heads=2, kv_heads=1), SQUARE, 2e-5)


def test_half_precision_stays_within_its_rounding() -> None:
    case = make_case(mask_kinds.build_mask(LONG_ROW, "embedded"), query_heads=1, kv_heads=1, dtype=torch.float16)
    check(case, SQUARE, 2**-8)  # weights and scores are rounded to 11 bits before each product


@pytest.mark.parametrize("tuning", [pytest.param(SQUARE, marks=pytest.mark.slow), DESCRIPTORS], ids=["square", "tma"])
def test_strided_tensors_are_read_as_they_lie(tuning: Tuning) -> None:
    """Transformers passes transposed views of [1, heads, tokens, dim] tensors."""
    mask = mask_kinds.build_mask(RowLayout.of_lengths([40]), "document_causal")
    case = make_case(mask, query_heads=2, kv_heads=2)
    expected, _ = run(case, tuning)
    names = ("query", "key", "value", "grad_output")
    strided = replace(
        case, **{name: getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1) for name in names}
    )
    assert not strided.query.is_contiguous()
    found, _ = run(strided, tuning)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_expanded_gradients_equal_dense_attention() -> None:
    mask = mask_kinds.build_mask(RowLayout.of_lengths([20]), "document_causal")
    case = make_case(mask, query_heads=1, kv_heads=1)
    for tuning in (SQUARE, DESCRIPTORS):
        expanded = replace(case, grad_output=torch.ones(()).expand_as(case.query))
        check(expanded, tuning, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads_per_gather", [1, 2, None])
@pytest.mark.parametrize("kind", ["document_causal", "embedded"])
def test_head_groups_gathered_in_turn_equal_dense_gradients(kind: str, heads_per_gather: int | None) -> None:
    """The output of each group is a view of its heads in the whole output; one rank suffices to test the order."""
    mask = mask_kinds.build_mask(SHORT_ROW, kind)
    case = make_case(mask, query_heads=4, kv_heads=2, sinks=True)
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value, case.sinks)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocks = np.zeros(-(-mask.num_tokens // 16), dtype=np.int64)
        share = ContextParallelRow(mask, Placement(blocks, np.zeros(1), 0.0), Among(dist.group.WORLD), block=16)
        output = context_parallel_attention(
            *inputs[:3], share, sinks=inputs[3], scale=case.scale, backend="triton", heads_per_gather=heads_per_gather
        )
        output.backward(case.grad_output)
    finally:
        dist.destroy_process_group()
    (expected, _), gradients = case.dense()
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


def test_the_interpreter_can_be_asked_for_by_name() -> None:
    mask = mask_kinds.build_mask(RowLayout.of_lengths([20, 12]), "document_causal")
    case = make_case(mask, query_heads=1, kv_heads=1)
    found = attention(case.query, case.key, case.value, mask, backend="triton")
    torch.testing.assert_close(found.double(), case.dense()[0][0], rtol=2e-5, atol=2e-5)


def test_queries_without_any_keys_give_zeros() -> None:
    mask, keys = mask_kinds.build_mask(RowLayout.of_lengths([20]), "full"), AttentionMask.from_tokens([])
    case = make_case(mask, keys, query_heads=1, kv_heads=1, sinks=True)
    (output, logsumexp), gradients = run(case, DESCRIPTORS)
    assert (output == 0).all()
    assert (logsumexp == -math.inf).all()
    assert all((gradient == 0).all() for gradient in gradients)
