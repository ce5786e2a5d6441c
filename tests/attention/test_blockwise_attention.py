"""The CPU path equals attention with a dense mask, forward and backward, and its memory is proportional to tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention.attention_cases import Case, assert_close_to_dense, make_case
from cases.attention.mask_kinds import embedded
from cases.attention.mask_strategies import masks, ragged_masks
from dilatant.attention import attention
from dilatant.attention.kernels import blockwise
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.packed_attention import KernelFunction
from dilatant.attention.kernels.scores import AttentionError, Kernel, Scores
from dilatant.attention.masks.mask import AttentionMask
from dilatant.attention.masks.packing import RowLayout, document_causal


def run(case: Case) -> tuple[tuple[torch.Tensor, torch.Tensor], list[torch.Tensor]]:
    inputs = [x.clone().requires_grad_() for x in (case.query, case.key, case.value)]
    sinks = None if case.sinks is None else case.sinks.clone().requires_grad_()
    plan, scores = AttentionPlan(case.mask, case.keys), Scores(case.scale, case.softcap)
    kernel = Kernel(blockwise.forward, blockwise.backward)
    output, logsumexp = KernelFunction.apply(*inputs, sinks, plan, scores, kernel)
    output.backward(case.grad_output)
    leaves = inputs if sinks is None else [*inputs, sinks]
    return (output.detach(), logsumexp.t()), [leaf.grad for leaf in leaves]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks and chunks so small that short rows have many of them."""
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", 8)
    monkeypatch.setattr(blockwise, "KEY_BLOCK", 4)
    monkeypatch.setattr(blockwise, "CHUNK_TOKENS", 20)
    torch.set_num_threads(1)


@given(
    mask=masks() | ragged_masks(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    softcap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=30, deadline=None, print_blob=True)
def test_outputs_and_gradients_equal_those_with_a_dense_mask(
    mask: AttentionMask, heads: tuple[int, int], softcap: float | None, sinks: bool, seed: int
) -> None:
    if not mask.num_tokens:
        return
    case = make_case(mask, query_heads=heads[0], kv_heads=heads[1], head_dim=5, softcap=softcap, sinks=sinks, seed=seed)
    # Sums of at most some tens of float32 terms of order one, against float64.
    assert_close_to_dense(*run(case), case, 2e-5)


@given(mask=masks(), seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=12, deadline=None, print_blob=True)
def test_some_queries_against_all_keys_in_another_order(mask: AttentionMask, seed: int, data: st.DataObject) -> None:
    if not mask.num_tokens:
        return
    order = data.draw(st.permutations(range(mask.num_tokens)))
    some = data.draw(st.lists(st.sampled_from(range(mask.num_tokens)), min_size=1, max_size=20))
    case = make_case(mask.take(some), mask.take(order), head_dim=4, seed=seed)
    assert_close_to_dense(*run(case), case, 2e-5)


@pytest.mark.parametrize(
    ("softcap", "sinks"),
    [
        (None, False),
        (0.7, True),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(0.7, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_function_itself(softcap: float | None, sinks: bool) -> None:
    row = RowLayout.of_samples([[("text", 2), ("vision", 3), ("text", 5)], [("text", 2), ("padding", 1)]])
    case = make_case(embedded(row), query_heads=2, kv_heads=1, head_dim=3, dtype=torch.float64, sinks=sinks)
    plan = AttentionPlan(case.mask)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    if case.sinks is not None:
        inputs.append(case.sinks.requires_grad_())

    def function(query, key, value, sinks=None):
        return attention(query, key, value, plan, softcap=softcap, sinks=sinks, backend="blockwise")

    assert torch.autograd.gradcheck(function, inputs)


def test_padding_gives_zeros_and_takes_zero_gradients() -> None:
    row = RowLayout.of_samples([[("text", 5), ("padding", 6)], [("padding", 3), ("text", 2)]])
    case = make_case(document_causal(row), sinks=True)
    (output, logsumexp), gradients = run(case)
    padding = torch.tensor(case.mask.fields) == 0
    assert (output[padding] == 0).all()
    assert (logsumexp[padding] == -math.inf).all()
    for gradient in gradients[:3]:
        assert (gradient[padding] == 0).all()
        assert gradient.isfinite().all()
    assert gradients[3].isfinite().all()


def test_a_row_of_padding_alone_is_zero() -> None:
    case = make_case(AttentionMask.from_tokens([0] * 7), sinks=True)
    (output, _), gradients = run(case)
    assert (output == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


def test_low_precision_inputs_are_summed_in_float32() -> None:
    row = RowLayout.of_samples([[("text", 9), ("vision", 12), ("text", 30)]])
    case = make_case(embedded(row), dtype=torch.bfloat16)
    (output, logsumexp), gradients = run(case)
    assert output.dtype == torch.bfloat16
    assert logsumexp.dtype == torch.float32
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
    # One rounding to bfloat16's 8 bits of values up to about 4.
    assert_close_to_dense((output, logsumexp), gradients, case, 2**-6)


def test_autocast_does_not_lower_the_precision_of_sums() -> None:
    row = RowLayout.of_samples([[("text", 9), ("vision", 12), ("text", 30)]])
    case = make_case(embedded(row))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(case)
    assert_close_to_dense(*found, case, 2e-5)  # as without: float32 sums of tens of terms


def test_a_long_sample_is_visited_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tokens = 3 * blockwise.CHUNK_TOKENS
    blocks = blockwise._blocks(AttentionPlan(document_causal(RowLayout.of_lengths([tokens]))), torch.device("cpu"))
    sizes = [sum(part.stop - part.start for part in chunk.slices) for block in blocks for chunk in block.chunks]
    assert max(sizes) == blockwise.CHUNK_TOKENS
    assert sum(sizes) >= tokens


@pytest.mark.slow
def test_no_tensor_grows_faster_than_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 64k tokens no tensor, tables included, exceeds a chunk of scores or a few numbers per token."""
    monkeypatch.undo()

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
            return result

    tokens = 65536
    row = RowLayout.of_samples([[("text", 250), ("vision", 750), ("text", 1048)]] * 32)
    plan = AttentionPlan(embedded(row))
    assert row.num_tokens == tokens
    query, key, value = (torch.randn(tokens, 1, 4) for _ in range(3))
    with Largest() as largest:
        output, logsumexp = blockwise.forward(query, key, value, None, plan, blockwise.Scores(0.5))
        blockwise.backward(output, query, key, value, None, output, logsumexp, plan, blockwise.Scores(0.5))
    scores_of_a_chunk = 8 * blockwise.QUERY_BLOCK * blockwise.CHUNK_TOKENS  # int64 words are compared pairwise
    assert largest.nbytes <= max(scores_of_a_chunk, 16 * tokens)
    tables = [plan.table(128, 128, transposed) for transposed in (False, True)]
    assert sum(table.nbytes for table in tables) < tokens


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda q, k, v: (q[:-1], k, v), "query has 11 tokens, the mask 12"),
        (lambda q, k, v: (q, k[:-1], v), "key has 11 tokens"),
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads are no multiple of 2 KV heads"),
        (lambda q, k, v: (q[..., :8], k, v), "head_dim 8, key 16"),
        (lambda q, k, v: (q, k, v.double()), "they must agree"),
        (lambda q, k, v: (q[0], k, v), r"query must be \[tokens, heads, head_dim\]"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(change, complaint: str) -> None:
    case = make_case(document_causal(RowLayout.of_lengths([12])))
    with pytest.raises(AttentionError, match=complaint):
        attention(*change(case.query, case.key, case.value), case.mask)
