"""The attention backend follows from the call and the machine, and every refusal gives a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention import mask_kinds
from cases.attention.attention_cases import make_case
from dilatant.attention import attention
from dilatant.attention.kernels import sdpa
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.backends import (
    AttentionCall,
    MachineCapabilities,
    _is_here,
    capable_backends,
    choose_backend,
    explain_here,
)
from dilatant.attention.kernels.mask_class import MaskClass, RaggedRow
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.masks import packing
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout

TRITON = frozenset({"triton"})
HOPPER = MachineCapabilities(TRITON | {"torch.nn.attention.varlen"}, capability=(9, 0))
BACKENDS = {"triton", "blockwise", "sdpa", "flex"}
LIBRARIES = {
    "varlen": "torch.nn.attention.varlen",
    "flash3": "flash_attn_interface",
    "cudnn_flex": "cudnn.flex_attention",
    "magi": "magi_attention.functional.flex_flash_attn",
}
EVERYTHING = MachineCapabilities(TRITON | set(LIBRARIES.values()), capability=(9, 0))


def here(machine: MachineCapabilities) -> set[str]:
    return BACKENDS | {name for name, package in LIBRARIES.items() if package in machine.packages}


ROW = RaggedRow(np.array([0, 3, 5], np.int32), 3, -1, 0, np.zeros(0, np.int64))
PACKED, EQUAL = MaskClass("causal", None, ROW), MaskClass("equal", None, ROW)
CPU = MachineCapabilities()


def request(**changes) -> AttentionCall:
    usual = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "value_dim": 128,
        "row": MaskClass("media", "the tokens of sample 0 attend in more than one way"),
    }
    return AttentionCall(**{**usual, **changes})


@pytest.mark.parametrize(
    ("asked", "machine", "chosen"),
    [
        (request(), HOPPER, "triton"),
        (request(row=PACKED), HOPPER, "triton"),
        (request(row=EQUAL), HOPPER, "sdpa"),
        (request(row=PACKED), replace(HOPPER, packages=frozenset({"torch.nn.attention.varlen"})), "varlen"),
        (request(row=PACKED), MachineCapabilities(TRITON, capability=(7, 5)), "sdpa"),
        (request(row=PACKED, softcap=True), HOPPER, "triton"),
        (request(row=PACKED, sinks=True), HOPPER, "triton"),
        (request(head_dim=320, value_dim=320), HOPPER, "blockwise"),
        (request(value_dim=64), HOPPER, "blockwise"),
        (request(dtype=torch.float64), HOPPER, "blockwise"),
        (request(), MachineCapabilities(capability=(9, 0)), "blockwise"),
        (request(), MachineCapabilities(TRITON, capability=(7, 0)), "blockwise"),
        (request(device="cpu"), CPU, "blockwise"),
        (request(device="cpu", row=PACKED), CPU, "sdpa"),
        (request(), EVERYTHING, "triton"),
        (request(head_dim=192, value_dim=128), EVERYTHING, "blockwise"),
    ],
)
def test_the_automatic_choice(asked: AttentionCall, machine: MachineCapabilities, chosen: str) -> None:
    choice = choose_backend(asked, machine)
    assert choice.name == chosen
    assert set(choice.others) == here(machine) - {chosen}
    assert all(choice.others.values())


@pytest.mark.parametrize(
    ("wanted", "asked", "machine", "reason"),
    [
        ("triton", request(device="cpu"), CPU, "Triton is not installed"),
        ("triton", request(device="cpu"), MachineCapabilities(TRITON), "on a CPU"),
        ("triton", request(), MachineCapabilities(TRITON, capability=(7, 5)), "7.5, below 8.0"),
        ("triton", request(head_dim=512, value_dim=512), HOPPER, "512 is above 256"),
        (
            "triton",
            request(device="cpu"),
            MachineCapabilities(TRITON, interpreter=True),
            "interpreter multiplies bfloat16 matrices wrongly",
        ),
        ("sdpa", request(), HOPPER, "attend in more than one way"),
        ("sdpa", request(row=PACKED, softcap=True), HOPPER, "cannot cap"),
        ("sdpa", request(row=PACKED, sinks=True), HOPPER, "sinks"),
        ("varlen", request(), HOPPER, "samples that all attend alike, and the tokens of sample 0 attend in more"),
        ("varlen", request(row=PACKED, dtype=torch.float32), HOPPER, "bfloat16 and float16, not torch.float32"),
        ("varlen", request(row=PACKED), MachineCapabilities(TRITON, capability=(9, 0)), "no torch.nn.attention.varlen"),
        ("varlen", request(row=PACKED, device="cpu"), HOPPER, "not on an NVIDIA GPU"),
        ("varlen", request(row=PACKED, head_dim=100, value_dim=100), HOPPER, "100 and 100 channels"),
        ("flash3", request(row=PACKED), HOPPER, "no flash_attn_interface here"),
        ("magi", request(), HOPPER, "no magi_attention.functional.flex_flash_attn here .it comes with github"),
        ("magi", request(), replace(EVERYTHING, capability=(10, 0)), "compute capability is 10.0, not 9.0"),
        ("magi", request(device="cpu"), EVERYTHING, "not on an NVIDIA GPU"),
        ("magi", request(dtype=torch.float32), EVERYTHING, "bfloat16 and float16, not torch.float32"),
        ("magi", request(head_dim=192, value_dim=128), EVERYTHING, "192 and 128 channels, more than 128"),
        ("cudnn_flex", request(), HOPPER, "no cudnn.flex_attention here .it comes with nvidia-cudnn-frontend on PyPI"),
        ("cudnn_flex", request(), replace(EVERYTHING, capability=(12, 0)), "12.0, not 9.0, 10.0 or 10.3"),
        ("cudnn_flex", request(head_dim=100, value_dim=100), EVERYTHING, "100 and 100 channels, not multiples of 8"),
        ("cudnn_flex", request(head_dim=256, value_dim=128), EVERYTHING, "256 and 128 channels"),
        ("cudnn_flex", request(sinks=True), EVERYTHING, "cuDNN's Flex has no attention sinks"),
        ("cudnn_flex", request(softcap=True), EVERYTHING, "cuDNN's Flex cannot cap scores"),
        ("flex", request(device="cpu"), CPU, "no backward on CPUs"),
        ("flex", request(sinks=True), HOPPER, "no attention sinks"),
        ("flash", request(), HOPPER, "unknown attention backend 'flash'"),
    ],
)
def test_a_backend_asked_for_by_name_runs_or_says_why_not(
    wanted: str, asked: AttentionCall, machine: MachineCapabilities, reason: str
) -> None:
    with pytest.raises(AttentionError, match=reason):
        choose_backend(asked, machine, wanted)


def test_libraries_take_every_mask_where_they_are_installed() -> None:
    for capability, able in (((9, 0), {"magi", "cudnn_flex"}), ((10, 0), {"cudnn_flex"}), ((8, 0), set())):
        machine = replace(EVERYTHING, capability=capability)
        assert {"magi", "cudnn_flex"} & set(capable_backends(request(), machine)) == able
    for channels in ((192, 128), (256, 256), (80, 80), (64, 128)):
        asked = request(head_dim=channels[0], value_dim=channels[1])
        assert "cudnn_flex" in capable_backends(asked, EVERYTHING)
        assert ("magi" in capable_backends(asked, EVERYTHING)) == (max(channels) <= 128)
    assert "magi" in capable_backends(request(softcap=True, sinks=True, head_dim=100, value_dim=36), EVERYTHING)


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loads_a_library"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no driver')")
    (package / "module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert [_is_here(f"loads_a_library{name}") for name in ("", ".inner", ".module", ".other")] == [True] * 3 + [False]
    assert not _is_here("not_there.inner")


def test_an_explanation_names_the_backend_and_the_others() -> None:
    line = explain_here(torch.device("cpu"), torch.bfloat16)["text and images"]
    assert line.startswith("blockwise (")
    assert "not sdpa: SDPA knows only whole and causal samples" in line


PLAIN = {
    "full": packing.full(RowLayout.of_lengths([9, 9, 9])),
    "document_causal": packing.document_causal(RowLayout.of_lengths([7, 3, 7, 1])),
    "causal": mask_kinds.causal(RowLayout.of_lengths([5, 9])),
    "text with padding": mask_kinds.embedded(RowLayout.of_samples([[("text", 6), ("padding", 3)], [("text", 4)]])),
    "images": mask_kinds.embedded(RowLayout.of_samples([[("image", 5)], [("image", 5)], [("text", 2)]])),
    "wide window": mask_kinds.sliding_window(RowLayout.of_lengths([4, 6]), 6),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_rows_run_on_sdpa_with_the_same_results(kind: str) -> None:
    case = make_case(PLAIN[kind])
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    output = attention(*inputs, case.mask, backend="sdpa")
    output.backward(case.grad_output)
    (expected, _), gradients = case.dense()
    # Float32 sums of tens of terms of order one.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (mask_kinds.sliding_window(RowLayout.of_lengths([4, 7]), 6), "sample 1 of 7 tokens is held to a window of 6"),
        (mask_kinds.embedded(RowLayout.of_samples([[("text", 2), ("image", 2)]])), "in more than one way"),
        (AttentionMask.from_tokens([1 | 2 << 12] * 3), "do not attend to their own modality"),
    ],
)
def test_rows_that_are_not_plain_say_why(mask: AttentionMask, reason: str) -> None:
    case = make_case(mask)
    with pytest.raises(AttentionError, match=reason):
        attention(case.query, case.key, case.value, mask, backend="sdpa")


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    padding=st.integers(0, 3),
    kind=st.sampled_from(["full", "document_causal"]),
    free_pairs=st.sampled_from([0, 32**2, 1 << 20]),
    heads=st.sampled_from([(2, 1), (4, 2), (2, 2)]),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=5, deadline=None, print_blob=True)
def test_drawn_plain_rows_on_sdpa_equal_dense_attention(
    lengths: list[int], padding: int, kind: str, free_pairs: int, heads: tuple[int, int], seed: int
) -> None:
    samples = [[("text", length), ("padding", padding)] for length in lengths]
    mask = mask_kinds.build_mask(RowLayout.of_samples(samples), kind)
    if not mask.num_tokens:
        return
    case = make_case(mask, query_heads=heads[0], kv_heads=heads[1], seed=seed)
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    with patch.dict(sdpa.FREE_PAIRS, cpu=free_pairs):
        output = attention(*inputs, case.mask, scale=case.scale, backend="sdpa")
        output.backward(case.grad_output)
    (expected, _), gradients = case.dense()
    # Float32 sums of up to sixty terms of order one.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60))
@settings(deadline=None, print_blob=True)
def test_padding_of_similar_samples_costs_little_extra_work(lengths: list[int]) -> None:
    groups = sdpa.group_samples(packing.document_causal(RowLayout.of_lengths(lengths)).runs, 1024)
    assert sorted(length for _, members in groups for _, length in members) == sorted(lengths)
    paid = sum(batch.samples * batch.length**2 for batch, _ in groups)
    assert paid <= sum(length**2 for length in lengths) * 8 / 7 + 1024 * len(lengths)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None, print_blob=True)
def test_full_samples_take_the_fewest_calls_within_their_padding(lengths: list[int]) -> None:
    groups = sdpa.group_samples(packing.full(RowLayout.of_lengths(lengths)).runs, 1 << 20)
    assert sorted(length for _, members in groups for _, length in members) == sorted(lengths)
    assert all(max(length for _, length in members) == batch.length for batch, members in groups)
    kinds = sorted(set(lengths))

    def pairs(longest: Sequence[int]) -> int:
        return sum(min(each for each in longest if each >= length) ** 2 for length in lengths)

    budget = sum(length**2 for length in lengths) + sdpa.PADDED_PAIRS * sum(lengths)
    assert pairs([batch.length for batch, _ in groups]) <= budget
    fewer = combinations(kinds[:-1], len(groups) - 2) if len(groups) > 1 else ()
    assert all(pairs([*longest, kinds[-1]]) > budget for longest in fewer)


def test_one_batch_is_samples_of_one_length_that_see_all_of_themselves() -> None:
    def is_one(mask: AttentionMask) -> bool:
        return AttentionPlan(mask).mask_class.kind == "equal"

    alike, unlike = RowLayout.of_lengths([4, 4]), RowLayout.of_lengths([4, 3])
    padded = RowLayout.of_samples([[("text", 4), ("padding", 4)]])
    assert is_one(packing.full(alike))
    assert not any(map(is_one, map(packing.full, (unlike, padded, RowLayout.of_lengths([])))))
    assert not is_one(packing.document_causal(alike))


def test_doctor_explains_every_backend_for_every_kind_of_row() -> None:
    lines = explain_here(torch.device("cpu"), torch.float32)
    expected = {"packed text": "sdpa", "sliding window": "blockwise", "text and images": "blockwise"}
    assert set(lines) == set(expected)
    for row, line in lines.items():
        assert line.startswith(f"{expected[row]} (")
        for other in BACKENDS - {expected[row]}:
            assert f"not {other}: " in line
