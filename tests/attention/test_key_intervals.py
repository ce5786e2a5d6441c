"""Masks as intervals of keys: for MagiAttention and cuDNN's Flex they say what the dense mask says, and so do calls."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention.attention_cases import Case, make_case, seen_by_oracle
from cases.attention.library_stand_ins import Call, CudnnFlex, Magi
from cases.attention.mask_strategies import masks, ragged_masks
from dilatant.attention import AttentionPlan, media_mask
from dilatant.attention.kernels import key_intervals
from dilatant.attention.kernels.backends import (
    MOST_KEY_RUNS,
    AttentionCall,
    MachineCapabilities,
    installed,
    unsupported_reason,
)
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks import packing
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout
from oracles.key_intervals import end_matrix, slice_matrix, slice_pairs

MIXED = RowLayout.of_samples(
    [
        [("image", 4), ("text", 5), ("image", 3), ("image", 3), ("text", 1), ("padding", 2)],
        [("text", 0)],
        [("text", 1)],
        [("text", 6), ("image", 5)],
        [("image", 1), ("text", 7), ("padding", 1)],
    ]
)
TEXT = RowLayout.of_lengths([9, 1, 0, 14])
CORNERS: dict[str, AttentionMask] = {
    "causal": packing.document_causal(TEXT),
    "window": packing.document_causal(TEXT).with_window(4),
    "own token": packing.document_causal(TEXT).with_window(1),
    "full": packing.full(TEXT),
    "full window": packing.full(TEXT).with_window(3),
    "prefix": packing.prefix_lm(TEXT, [4, 1, 0, 14]),
    "prefix window": packing.prefix_lm(TEXT, [4, 0, 0, 2]).with_window(3),
    **{f"{kind} media": media_mask(MIXED, kind) for kind in packing.MEDIA_KINDS},
    "bidirectional window": media_mask(MIXED, "bidirectional").with_window(5),
    "padding": packing.with_padding(packing.document_causal(RowLayout.of_lengths([3])), 4),
}


def check_tables(mask: AttentionMask, keys: AttentionMask | None = None) -> key_intervals.Slices:
    """Assert that both tables say what the dense mask says; return the slices."""
    plan = AttentionPlan(mask, keys)
    expected = seen_by_oracle(mask, keys).numpy()
    table = key_intervals.intervals(plan)
    ends = key_intervals.endpoints(table)
    assert ends.dtype == np.int32
    assert (end_matrix(ends[0], plan.keys.num_tokens) == expected).all()
    found = key_intervals.slices(table)
    assert {part.dtype for part in found} == {np.dtype(np.int32)}
    assert (slice_matrix(*found, expected.shape) == expected).all()
    return found


@pytest.mark.parametrize("kind", CORNERS)
def test_intervals_of_corner_cases_are_the_dense_mask(kind: str) -> None:
    check_tables(CORNERS[kind])


@given(masks() | ragged_masks())
@settings(max_examples=150, deadline=None, print_blob=True)
def test_intervals_of_drawn_rows_are_the_dense_mask(mask: AttentionMask) -> None:
    if mask.num_tokens:
        check_tables(mask)


@given(masks(), st.integers(0, 1 << 16))
@settings(max_examples=40, deadline=None, print_blob=True)
def test_intervals_of_keys_in_another_order(mask: AttentionMask, seed: int) -> None:
    if mask.num_tokens:
        order = np.random.default_rng(seed).permutation(mask.num_tokens)
        check_tables(mask.take(order[: 1 + mask.num_tokens // 2]), mask.take(order))


PICTURES = {
    (5, 2): ("11 11 11 11 11", "00 00 00 10 11", "11 01 00 00 00", "00 00 00 00 00"),
    (2, 5): ("11111 11111", "11110 11111", "11111 01111", "11110 01111"),
    (3, 3): ("111 111 111", "100 110 111", "111 011 001", "100 010 001"),
}
"""The pictures on the page of `flex_flash_attn_func`, for (queries, keys) and the types 0 to 3; those of five keys for
five queries are cut to three."""


def test_the_oracle_of_slices_draws_the_librarys_pictures() -> None:
    for shape, pictures in PICTURES.items():
        for kind, picture in enumerate(pictures):
            drawn = [[digit == "1" for digit in row] for row in picture.split()]
            assert (slice_pairs(*shape, kind) == np.array(drawn)).all()


def test_rows_have_few_slices() -> None:
    def count(mask: AttentionMask) -> int:
        return len(check_tables(mask).kinds)

    assert count(packing.document_causal(RowLayout.of_lengths([9, 30, 1]))) == 3
    assert count(packing.document_causal(RowLayout.of_lengths([9, 30, 1])).with_window(9)) == 4
    assert count(packing.full(RowLayout.of_lengths([9, 30])).with_window(4)) == 6
    row = RowLayout.of_samples([[("text", 9), ("image", 7), ("text", 8), ("image", 5)]])
    assert count(media_mask(row, "causal")) == 1
    assert count(media_mask(row, "bidirectional")) == 4
    assert count(packing.prefix_lm(RowLayout.of_lengths([20]), [8])) == 2


def run_magi(case: Case, *inputs: torch.Tensor, library: Any = None) -> torch.Tensor:
    plan, scores = AttentionPlan(case.mask, case.keys), Scores(case.scale, case.softcap)
    return key_intervals.magi(library or Magi(), *inputs, case.sinks, plan, scores)


def run_cudnn(case: Case, *inputs: torch.Tensor, library: Any = None) -> torch.Tensor:
    plan, scores = AttentionPlan(case.mask, case.keys), Scores(case.scale)
    return key_intervals.cudnn_flex(library or CudnnFlex(), *inputs, None, plan, scores)


def check(case: Case, run: Any) -> None:
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    output = run(case, *inputs)
    output.backward(case.grad_output)
    (expected, _), gradients = case.dense()
    # Float32 sums of tens of terms of order one.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients]):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("run", [run_magi, run_cudnn])
@pytest.mark.parametrize("kind", CORNERS)
def test_calls_of_both_libraries_are_dense_attention(kind: str, run: Any) -> None:
    check(make_case(CORNERS[kind]), run)


@pytest.mark.parametrize("run", [run_magi, run_cudnn])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 1), 64), ((4, 2), 80), ((3, 3), 128)])
def test_calls_with_grouped_heads_of_any_size(heads: tuple[int, int], head_dim: int, run: Any) -> None:
    mask = CORNERS["isolated media"]
    check(make_case(mask, query_heads=heads[0], kv_heads=heads[1], head_dim=head_dim), run)


def test_magis_calls_cap_scores_and_have_sinks() -> None:
    case = make_case(CORNERS["bidirectional window"], softcap=2.0, sinks=True)
    sinks = case.sinks.requires_grad_()
    check(case, run_magi)
    torch.testing.assert_close(sinks.grad.double(), case.dense()[1][3], rtol=2e-5, atol=2e-5)  # as above


def test_values_may_have_other_channels_than_keys() -> None:
    case = make_case(CORNERS["causal"], head_dim=72)
    wide, narrow = (run_magi(case, case.query, case.key, case.value[..., :n]) for n in (72, 40))
    assert narrow.shape[2] == 40
    torch.testing.assert_close(wide[..., :40], narrow, rtol=0, atol=0)


@pytest.mark.parametrize("run", [run_magi, run_cudnn])
def test_a_row_of_padding_has_zeros_and_gradients(run: Any) -> None:
    case = make_case(packing.with_padding(packing.full(RowLayout.of_lengths([])), 3))
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    output = run(case, *inputs)
    output.backward(case.grad_output)
    assert all((found == 0).all() for found in (output, *(x.grad for x in inputs)))


def test_layers_of_one_shape_share_a_plan_of_cudnn() -> None:
    case, library = make_case(CORNERS["causal"]), CudnnFlex()
    plan = AttentionPlan(case.mask)

    def attend(*inputs: torch.Tensor) -> None:
        key_intervals.cudnn_flex(library, *inputs, None, plan, Scores(case.scale))

    attend(case.query, case.key, case.value)
    attend(case.query, case.key, case.value)
    attend(case.query, case.key, case.value.requires_grad_())
    attend(case.query[:, :2], case.key, case.value)
    names = [name for name, _, _ in library.calls]
    assert (names.count("create_mask_plan"), names.count("flex_attn_func")) == (3, 4)


def source_of(module: str) -> Path:
    """Return the file of a module; skip where there is none. The module is not imported: it needs a GPU's libraries."""
    package, *inner = module.split(".")
    found = importlib.util.find_spec(package)
    for place in (found and found.submodule_search_locations) or ():
        if (path := Path(place, *inner).with_suffix(".py")).is_file():
            return path
    pytest.skip(f"{module} is not installed: our call was not compared with its signature")


def signature(module: str, name: str) -> inspect.Signature:
    """Return the signature of a function as its source says, with None for every default."""
    tree = ast.parse(source_of(module).read_text())
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.body, found.decorator_list, found.returns = [ast.Pass()], [], None
    arguments = found.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    space: dict[str, FunctionType] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), module, "exec"), space)
    return inspect.signature(space[name])


def calls_of(library: Magi | CudnnFlex) -> list[Call]:
    case = make_case(CORNERS["causal"])
    run = run_magi if isinstance(library, Magi) else run_cudnn
    run(case, case.query, case.key, case.value, library=library)
    return library.calls


@pytest.mark.parametrize(
    ("library", "module", "name"),
    [
        (Magi, "magi_attention.functional.flex_flash_attn", "flex_flash_attn_func"),
        (CudnnFlex, "cudnn.flex_attention.plan.builder", "create_mask_plan"),
        (CudnnFlex, "cudnn.flex_attention.api", "flex_attn_func"),
    ],
)
def test_real_functions_take_our_arguments(library: Any, module: str, name: str) -> None:
    arguments = next((args, options) for called, args, options in calls_of(library()) if called == name)
    bound = signature(module, name).bind(*arguments[0], **arguments[1])
    assert set(bound.arguments) >= {"q", "k", "v"}


def test_masks_with_more_runs_than_intervals_are_refused() -> None:
    def reasons(images: int) -> set[str | None]:
        row = RowLayout.of_samples([[("text", 1), ("image", 1)] * images, [("text", 9)]])
        row_class = AttentionPlan(media_mask(row, "isolated")).mask_class
        packages = frozenset({"cudnn.flex_attention", "magi_attention.functional.flex_flash_attn"})
        call = AttentionCall("cuda", torch.bfloat16, 64, 64, row_class)
        here = MachineCapabilities(packages, (9, 0))
        return {unsupported_reason(name, call, here) for name in ("cudnn_flex", "magi")}

    at_most = MOST_KEY_RUNS // 2
    assert reasons(at_most) == {None}
    assert reasons(at_most + 1) == {f"a sample has {MOST_KEY_RUNS + 2} runs of keys, more than {MOST_KEY_RUNS}"}


def test_the_most_runs_give_exact_intervals() -> None:
    row = RowLayout.of_samples([[("text", 1), ("image", 2)] * (MOST_KEY_RUNS // 2)])
    table = key_intervals.intervals(AttentionPlan(media_mask(row, "isolated")))
    assert np.diff(table.offsets).max() == MOST_KEY_RUNS // 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: MagiAttention and cuDNN's Flex did not run")
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", ["magi", "cudnn_flex"])
@pytest.mark.parametrize("kind", ["causal", "window", "bidirectional", "isolated", "prefix", "sinks"])
def test_both_libraries_on_a_gpu_are_dense_attention(kind: str, name: str, head_dim: int) -> None:
    from dilatant.attention import attention
    from dilatant.attention.kernels.backends import request_of

    row = RowLayout.of_samples([[("text", 90), ("image", 300), ("text", 41), ("padding", 9)], [("text", 200)]])
    text = packing.document_causal(row)
    mask = {
        "window": text.with_window(64),
        "bidirectional": media_mask(row, "bidirectional"),
        "isolated": media_mask(row, "isolated"),
        "prefix": packing.prefix_lm(row, [400, 3]),
    }.get(kind, text)
    case = make_case(mask, head_dim=head_dim, dtype=torch.bfloat16, sinks=kind == "sinks")
    device = torch.device("cuda")
    inputs = [x.to(device).requires_grad_() for x in (case.query, case.key, case.value)]
    sinks = None if case.sinks is None else case.sinks.to(device)
    request = request_of(*inputs, AttentionPlan(mask), sinks=sinks)
    if (reason := unsupported_reason(name, request, installed(device))) is not None:
        pytest.skip(f"{name} does not run here: {reason}")
    output = attention(*inputs, mask, scale=case.scale, sinks=sinks, backend=name)
    output.backward(case.grad_output.to(device))
    (expected, _), gradients = case.dense()
    # Roundings of weights and results of order one to 8 bits.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients]):
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=2**-5, atol=2**-5)
