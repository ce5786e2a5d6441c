"""The backend is chosen by what a call asks and a machine offers, and every refusal says why."""

from __future__ import annotations

import pytest
import torch
from attention_cases import make_case
from hypothesis import given, settings
from mask_strategies import masks, ragged_masks

from dilatant.attention import attention, flex, packing
from dilatant.attention.attention_plan import AttentionPlan
from dilatant.attention.backends import Installed, Request, choose_backend, explain_backend
from dilatant.attention.explain import explain_here
from dilatant.attention.mask import AttentionMask
from dilatant.attention.packing import RowLayout
from dilatant.attention.scores import AttentionError

HOPPER = Installed(triton=True, capability=(9, 0))
CPU = Installed()


def request(**changes) -> Request:
    usual = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "value_dim": 128,
        "query_tokens": 1024,
        "key_tokens": 1024,
        "not_plain": "the tokens of sample 0 attend in more than one way",
    }
    return Request(**{**usual, **changes})


@pytest.mark.parametrize(
    ("asked", "machine", "chosen"),
    [
        (request(), HOPPER, "triton"),
        (request(head_dim=320, value_dim=320), HOPPER, "flex"),
        (request(value_dim=64), HOPPER, "flex"),
        (request(head_dim=320, query_tokens=1 << 20), HOPPER, "blockwise"),
        (request(dtype=torch.float64), HOPPER, "blockwise"),
        (request(), Installed(triton=False, capability=(9, 0)), "blockwise"),
        (request(), Installed(triton=True, capability=(7, 0)), "flex"),
        (request(device="cpu"), CPU, "blockwise"),
        (request(device="cpu", not_plain=None), CPU, "blockwise"),
    ],
)
def test_the_automatic_choice(asked: Request, machine: Installed, chosen: str) -> None:
    choice = choose_backend(asked, machine)
    assert choice.name == chosen
    assert set(choice.others) == {"triton", "flex", "blockwise", "sdpa"} - {chosen}
    assert all(choice.others.values())


@pytest.mark.parametrize(
    ("wanted", "asked", "machine", "reason"),
    [
        ("triton", request(device="cpu"), CPU, "Triton is not installed"),
        ("triton", request(device="cpu"), Installed(triton=True), "on a CPU"),
        ("triton", request(), Installed(triton=True, capability=(7, 5)), "7.5, below 8.0"),
        ("triton", request(head_dim=512, value_dim=512), HOPPER, "512 is above 256"),
        (
            "triton",
            request(device="cpu"),
            Installed(triton=True, interpreter=True),
            "interpreter multiplies bfloat16 matrices wrongly",
        ),
        ("flex", request(device="cpu"), CPU, "no gradients on cpu"),
        ("flex", request(query_tokens=1 << 19), HOPPER, "dense"),
        ("sdpa", request(), HOPPER, "attend in more than one way"),
        ("sdpa", request(not_plain=None, softcap=True), HOPPER, "cannot cap"),
        ("sdpa", request(not_plain=None, sinks=True), HOPPER, "sinks"),
        ("flash", request(), HOPPER, "unknown attention backend 'flash'"),
    ],
)
def test_a_backend_asked_for_by_name_runs_or_says_why_not(
    wanted: str, asked: Request, machine: Installed, reason: str
) -> None:
    with pytest.raises(AttentionError, match=reason):
        choose_backend(asked, machine, wanted)


def test_an_explanation_names_the_backend_and_the_others() -> None:
    plan = AttentionPlan(packing.build_mask(RowLayout.of_samples([[("text", 4), ("image", 4)]]), "embedded"))
    text = str(explain_backend("cpu", torch.bfloat16, 128, plan))
    assert text.startswith("attention backend: blockwise")
    assert "not sdpa: SDPA knows only whole and causal samples" in text


PLAIN = {
    "full": packing.full(RowLayout.of_lengths([9, 9, 9])),
    "document_causal": packing.document_causal(RowLayout.of_lengths([7, 3, 7, 1])),
    "causal": packing.causal(RowLayout.of_lengths([5, 9])),
    "text with padding": packing.embedded(
        RowLayout.of_samples([[("text", 6), ("padding", 3)], [("text", 4)]])
    ),
    "images": packing.embedded(RowLayout.of_samples([[("image", 5)], [("image", 5)], [("text", 2)]])),
    "wide window": packing.sliding_window(RowLayout.of_lengths([4, 6]), 6),
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
        (
            packing.sliding_window(RowLayout.of_lengths([4, 7]), 6),
            "sample 1 of 7 tokens is held to a window of 6",
        ),
        (packing.embedded(RowLayout.of_samples([[("text", 2), ("image", 2)]])), "in more than one way"),
        (AttentionMask.from_tokens([1 | 2 << 12] * 3), "do not attend to their own modality"),
    ],
)
def test_rows_that_are_not_plain_say_why(mask: AttentionMask, reason: str) -> None:
    case = make_case(mask)
    with pytest.raises(AttentionError, match=reason):
        attention(case.query, case.key, case.value, mask, backend="sdpa")


@given(mask=masks() | ragged_masks())
@settings(max_examples=30, deadline=None, print_blob=True)
def test_the_rule_given_to_flex_attention_is_ours(mask: AttentionMask) -> None:
    if not mask.num_tokens:
        return
    case = make_case(mask, head_dim=2)
    rule = flex.mask_mod(AttentionPlan(mask), torch.device("cpu"))
    places = torch.arange(mask.num_tokens)
    assert torch.equal(rule(None, None, places[:, None], places[None, :]), case.seen)


def test_flex_attention_over_our_tables_equals_dense_attention() -> None:
    """Forward alone: FlexAttention has no gradients on CPUs."""
    from torch.nn.attention.flex_attention import flex_attention

    samples = [[("text", 40), ("image", 110), ("text", 20)], [("text", 10), ("padding", 15)]]
    case = make_case(
        packing.build_mask(RowLayout.of_samples(samples), "embedded"), query_heads=2, kv_heads=1, softcap=2.0
    )
    block_mask = flex.block_mask(AttentionPlan(case.mask), torch.device("cpu"))
    whole_blocks = torch.zeros(256, 256, dtype=torch.bool)
    whole_blocks[:195, :195] = case.seen
    assert torch.equal(
        block_mask.to_dense()[0, 0].bool(),
        whole_blocks.view(2, 128, 2, 128).transpose(1, 2).flatten(2).any(2),
    )
    output = flex_attention(
        *(x.transpose(0, 1)[None] for x in (case.query, case.key, case.value)),
        block_mask=block_mask,
        score_mod=flex.capped(2.0),
        scale=case.scale,
        enable_gqa=True,
    )
    expected = case.dense()[0][0]
    torch.testing.assert_close(output[0].transpose(0, 1).double(), expected, rtol=2e-5, atol=2e-5)


def test_doctor_explains_every_backend_for_every_kind_of_row() -> None:
    lines = explain_here(torch.device("cpu"), torch.float32)
    assert set(lines) == {"packed text", "sliding window", "text and images"}
    for line in lines.values():
        assert line.startswith("blockwise (")
        for other in ("triton", "flex", "sdpa"):
            assert f"not {other}: " in line
