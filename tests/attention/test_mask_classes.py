"""The class of a mask, and the backends that it allows: flash attention of ragged rows, FlexAttention, the fastest."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.attention import mask_kinds
from cases.attention.attention_cases import Case, make_case, seen_by_oracle
from dilatant.attention import AttentionPlan, attention
from dilatant.attention.kernels import measured, ragged
from dilatant.attention.kernels.backends import AttentionCall, MachineCapabilities, choose_backend, installed
from dilatant.attention.kernels.mask_class import MaskClass, RaggedRow
from dilatant.attention.kernels.measured import MeasuredRow, measured_rows, store_measured
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks import packing
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout
from dilatant.planning.measuring.attention_seconds import Rows, measure_attention

CPU = torch.device("cpu")
PADDED = [[("text", 9), ("padding", 3)], [("text", 1)], [("text", 14), ("padding", 2)]]
RAGGED = {
    "causal": packing.document_causal(RowLayout.of_samples(PADDED)),
    "full": packing.full(RowLayout.of_samples(PADDED)),
    "window": packing.document_causal(RowLayout.of_samples(PADDED)).with_window(4),
    "full window": packing.full(RowLayout.of_samples(PADDED)).with_window(3),
    "images": mask_kinds.embedded(RowLayout.of_samples([[("image", 5)], [("image", 8)]])),
}


def visible(row: RaggedRow) -> np.ndarray:
    """Return which keys each query sees, bool `[tokens, tokens]`, pair by pair from a row's numbers."""
    tokens = int(row.borders[-1])
    seen = np.zeros((tokens, tokens), bool)
    for first, end in zip(row.borders[:-1], row.borders[1:], strict=True):
        assert end - first <= row.longest
        for query in range(first, end):
            for key in range(first, end):
                behind = query - key
                seen[query, key] = (row.before < 0 or behind <= row.before) and (row.after < 0 or -behind <= row.after)
    seen[row.padding] = seen[:, row.padding] = False
    return seen


def drawn(kind: str, lengths: list[int], padding: int, window: int | None) -> AttentionMask:
    kinds = ("text", "image") if kind == "two kinds" else ("text",)
    parts = [[(kinds[number % len(kinds)], length)] for number, length in enumerate(lengths)]
    row = RowLayout.of_samples([[*part, ("padding", padding)] for part in parts])
    mask = {"full": packing.full, "causal": packing.document_causal}.get(kind, mask_kinds.embedded)(row)
    return mask.with_window(window)


@given(
    kind=st.sampled_from(["full", "causal", "two kinds"]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    padding=st.integers(0, 2),
    window=st.none() | st.integers(1, 9),
)
@settings(max_examples=150, deadline=None, print_blob=True)
def test_ragged_rows_see_what_their_masks_say(kind: str, lengths: list[int], padding: int, window: int | None) -> None:
    mask = drawn(kind, lengths, padding, window)
    found = AttentionPlan(mask).mask_class
    if kind != "two kinds":
        assert found.row is not None
    if found.row is not None:
        assert (visible(found.row) == seen_by_oracle(mask).numpy()).all()


def test_classes_of_rows() -> None:
    assert [AttentionPlan(mask).mask_class.kind for mask in RAGGED.values()] == [
        "causal", "full", "window", "window", "full",
    ]  # fmt: skip
    media = mask_kinds.embedded(RowLayout.of_samples([[("text", 2), ("image", 3)]]))
    unlike = mask_kinds.embedded(RowLayout.of_samples([[("image", 5)], [("text", 2)]]))
    assert {AttentionPlan(mask).mask_class.kind for mask in (media, unlike)} == {"media"}
    assert AttentionPlan(packing.full(RowLayout.of_lengths([4, 4]))).mask_class.kind == "equal"


def stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute what torch's page says of `varlen_attn`, sample by sample."""
    assert (cu_seq_q.dtype, cu_seq_k is cu_seq_q, max_k, enable_gqa) == (torch.int32, True, max_q, True)
    ends, outputs = cu_seq_q.tolist(), []
    for first, end in itertools.pairwise(ends):
        q, k, v = (part[first:end].transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
        places = torch.arange(end - first)
        behind = places[:, None] - places
        left, right = window_size
        hidden = (behind > left if left >= 0 else behind < -end) | (behind < -right if right >= 0 else behind > end)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def flash3_stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, softmax_scale: float, causal: bool, window_size: tuple[int, int], deterministic: bool,
) -> Tensor:  # fmt: skip
    assert not deterministic
    assert not causal or window_size == (-1, -1)
    seen = (-1, 0) if causal else window_size
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return stand_in(q, k, v, *lengths, scale=softmax_scale, window_size=seen, enable_gqa=True)


def check(case: Case, run: Any) -> None:
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    output = run(*inputs)
    output.backward(case.grad_output)
    (expected, _), gradients = case.dense()
    # Float32 sums of tens of terms of order one.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("call", [partial(ragged.varlen, stand_in), partial(ragged.flash3, flash3_stand_in)])
def test_calls_of_flash_attention_are_dense_attention(kind: str, call: ragged.Operator) -> None:
    case = make_case(RAGGED[kind])
    plan, scores = AttentionPlan(case.mask), Scores(case.scale)
    check(case, lambda *inputs: ragged.attend(call, *inputs, None, plan, scores))


def test_torchs_operator_takes_the_call_of_a_row() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    query, key = (torch.empty(29, heads, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    plan = AttentionPlan(packing.document_causal(RowLayout.of_lengths([12, 1, 16])))
    output = ragged.attend(ragged.load_operator("varlen"), query, key, key, None, plan, Scores(0.25))
    assert output.shape == query.shape


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", [*RAGGED, "media", "prefix"])
def test_flex_attention_sees_what_masks_say(kind: str, softcap: float | None) -> None:
    samples = [[("text", 40), ("image", 90), ("text", 61), ("padding", 7)], [("text", 30), ("image", 70)]]
    row = RowLayout.of_samples(samples)
    masks = {**RAGGED, "media": packing.media_mask(row, "bidirectional"), "prefix": packing.prefix_lm(row, [50, 3])}
    case = make_case(masks[kind], softcap=softcap)
    with torch.no_grad():
        output = attention(
            case.query, case.key, case.value, case.mask, scale=case.scale, softcap=softcap, backend="flex"
        )
    # Float32 sums of up to two hundred terms of order one.
    torch.testing.assert_close(output.double(), case.dense()[0][0], rtol=2e-5, atol=2e-5)


HOPPER = MachineCapabilities(frozenset({"triton", "torch.nn.attention.varlen"}), (9, 0))
ROW = AttentionPlan(packing.document_causal(RowLayout.of_lengths([3, 2]))).mask_class


def choice(rows: list[MeasuredRow], **changes: Any) -> str:
    here = MachineCapabilities(changes.pop("packages", HOPPER.packages), HOPPER.capability, measured=tuple(rows))
    usual = {"device": "cuda", "dtype": torch.bfloat16, "head_dim": 128, "value_dim": 128, "row": ROW, "group": 4}
    return choose_backend(AttentionCall(**{**usual, **changes}), here).name


def test_the_fastest_measured_backend_runs_where_it_can() -> None:
    seconds = {"flex": 4.0, "varlen": 1.0, "triton": 2.0, "flash3": 0.5}
    rows = [MeasuredRow("causal", "bfloat16", 4, 128, 16384, seconds)]
    assert choice([]) == "triton"
    assert choice(rows) == "varlen"  # flash3 is not installed any more
    assert choice(rows, softcap=True) == "triton"
    assert choice(rows, head_dim=64, value_dim=64) == choice(rows, group=1) == choice(rows, dtype=torch.float16)
    assert choice(rows, group=1) == "triton"
    assert choice(rows, row=MaskClass("media", "not plain")) == "triton"
    media = [MeasuredRow("media", "bfloat16", 4, 128, 16384, {"triton": 2.0, "cudnn_flex": 1.5, "magi": 1.0})]
    assert choice(media, row=MaskClass("media", "not plain")) == "triton"  # neither is installed
    both = HOPPER.packages | {"cudnn.flex_attention", "magi_attention.functional.flex_flash_attn"}
    assert choice(media, row=MaskClass("media", "not plain"), packages=both) == "magi"
    assert choice(media, row=MaskClass("media", "not plain", key_runs=9999), packages=both) == "triton"


@pytest.fixture
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path))
    return tmp_path


def test_measured_seconds_choose_in_later_calls(own_cache: Any) -> None:
    other = MeasuredRow("full", "float32", 1, 8, 64, {"sdpa": 1.0, "blockwise": 2.0})
    store_measured([other], "cpu")
    store_measured([MeasuredRow("causal", "float32", 2, 16, 64, {"sdpa": 2.0, "blockwise": 1.0})], "cpu")
    assert len(measured_rows("cpu")) == 2
    call = AttentionCall("cpu", torch.float32, 16, 16, ROW, group=2)
    found = choose_backend(call, installed(CPU))
    assert (found.name, found.reason) == ("blockwise", "the fastest here")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose_backend(call, installed(CPU)).name == "sdpa"
    finally:
        torch.use_deterministic_algorithms(False)


def test_seconds_are_kept_by_versions_of_all_libraries(own_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = set()
    for newer in ("none", "torch", "triton", "magi_attention", "nvidia-cudnn-frontend"):
        measured._versions.cache_clear()
        monkeypatch.setattr(measured, "_version", lambda package, newer=newer: "2" if package == newer else "1")
        paths.add(measured._path("cpu", None))
    measured._versions.cache_clear()
    assert len(paths) == 5


@pytest.mark.parametrize("content", ["", "{", '[{"mask": 3}]', "\xff"])
def test_a_damaged_file_of_seconds_counts_as_none(
    own_cache: Any, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_measured([MeasuredRow("full", "float32", 1, 8, 64, {"sdpa": 1.0})], "cpu")
    (path,) = (own_cache / "costs").iterdir()
    (damaged := path.parents[1] / "other" / "costs" / path.name).parent.mkdir(parents=True)
    damaged.write_bytes(content.encode("latin-1"))
    monkeypatch.setenv("DILATANT_CACHE", str(damaged.parents[1]))
    assert measured_rows("cpu") == ()


def test_backends_are_timed_and_failures_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room\nsecond line")

    monkeypatch.setattr("dilatant.attention.kernels.sdpa.attend", fails)
    kinds = [Rows("causal", 2, 8, None), Rows("full", 1, 8, None), Rows("media", 2, 8, None)]
    found = measure_attention(kinds, CPU, torch.float32, 64)
    assert [row.mask for row in found] == ["causal", "full", "media"]
    for row in found[:2]:
        assert (list(row.seconds), row.failed) == (["blockwise"], {"sdpa": "no room"})
        assert row.seconds["blockwise"] > 0
    assert not found[2].seconds  # nothing to choose from


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: its backends were not checked")
@pytest.mark.parametrize("name", ["varlen", "flash3", "flex", "sdpa", "triton"])
@pytest.mark.parametrize("kind", [*RAGGED, "media"])
def test_backends_on_a_gpu_are_dense_attention(kind: str, name: str) -> None:
    from dilatant.attention.kernels.backends import capable_backends

    media = mask_kinds.embedded(RowLayout.of_samples([[("text", 90), ("image", 300), ("text", 41), ("padding", 9)]]))
    case = make_case({**RAGGED, "media": media}[kind], head_dim=64, dtype=torch.bfloat16)
    device = torch.device("cuda")
    request = AttentionCall("cuda", torch.bfloat16, 64, 64, AttentionPlan(case.mask).mask_class, group=2)
    if name not in capable_backends(request, installed(device)):
        pytest.skip(f"{name} does not run {kind} rows here")
    inputs = [x.to(device).requires_grad_() for x in (case.query, case.key, case.value)]
    output = attention(*inputs, case.mask, scale=case.scale, backend=name)
    output.backward(case.grad_output.to(device))
    (expected, _), gradients = case.dense()
    # Roundings of weights and results of order one to 8 bits.
    for found, wanted in zip([output, *(x.grad for x in inputs)], [expected, *gradients], strict=True):
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=2**-5, atol=2**-5)
