"""Attention over ranks equals attention in one process: every mask, any placement, ragged lengths, both passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.attention.mask_kinds import MASK_KINDS, build_mask
from cases.attention.mask_strategies import masks
from dilatant.attention import AttentionMask, RowLayout, attention, block_workloads, place_blocks
from dilatant.attention.context_parallel import ContextParallelRow, context_parallel_attention
from dilatant.attention.masks.blocks import block_table
from dilatant.attention.masks.placement import POLICIES, Placement
from harness.rank_pool import Among, RankPool

BLOCK = 16
ROW = RowLayout.of_samples(
    [
        [("image", 33), ("audio", 20), ("text", 30)],
        [("image", 7), ("image", 41), ("text", 12), ("padding", 9)],
        [("text", 29)],
    ]
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@dataclass(frozen=True)
class Call:
    """Tensors over the whole row and how to run them; travels to every rank."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    grad_output: torch.Tensor
    fields: np.ndarray
    positions: np.ndarray
    window: int | None
    rank_of_block: np.ndarray
    softcap: float | None = None
    layer_window: int | None = None
    heads_per_gather: int | None = None

    @property
    def mask(self) -> AttentionMask:
        return AttentionMask.from_tokens(self.fields, self.positions, self.window)


def run_share(group: Among, call: Call) -> tuple[np.ndarray, list[torch.Tensor]]:
    """One rank's tokens, and its output and gradients of query, key, value and sinks."""
    placement = Placement(call.rank_of_block, np.zeros(len(group.ranks)), 0.0)
    share = ContextParallelRow(call.mask, placement, group, block=BLOCK)
    if call.layer_window is not None:
        share = share.windowed(call.layer_window)
    inputs = [share.take(x).requires_grad_() for x in (call.query, call.key, call.value)]
    sinks = None if call.sinks is None else call.sinks.clone().requires_grad_()
    output = context_parallel_attention(
        *inputs, share, softcap=call.softcap, sinks=sinks, heads_per_gather=call.heads_per_gather
    )
    output.backward(share.take(call.grad_output))
    leaves = inputs if sinks is None else [*inputs, sinks]
    rows = [x[: share.tokens.size] for x in (output.detach(), *(leaf.grad for leaf in inputs))]
    return share.tokens, [*rows, *(leaf.grad for leaf in leaves[3:])]


def run_alone(call: Call) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
    sinks = None if call.sinks is None else call.sinks.clone().requires_grad_()
    mask = call.mask if call.layer_window is None else call.mask.with_window(call.layer_window)
    output = attention(*inputs, mask, softcap=call.softcap, sinks=sinks, backend="blockwise")
    output.backward(call.grad_output)
    leaves = inputs if sinks is None else [*inputs, sinks]
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def make_call(
    mask: AttentionMask,
    ranks: int,
    policy: str = "lpt",
    *,
    heads: tuple[int, int] = (4, 2),
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options,
) -> Call:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    work = block_workloads(mask, BLOCK)
    placement = place_blocks(work, ranks, policy)
    query_heads, kv_heads = heads
    return Call(
        query=draw(mask.num_tokens, query_heads, 8),
        key=draw(mask.num_tokens, kv_heads, 8),
        value=draw(mask.num_tokens, kv_heads, 8),
        sinks=draw(query_heads) if sinks else None,
        grad_output=draw(mask.num_tokens, query_heads, 8),
        fields=np.array(mask.fields),
        positions=np.array(mask.positions),
        window=mask.window,
        rank_of_block=placement.rank_of_block,
        **options,
    )


def check(pool: RankPool, ranks: int, call: Call, tolerance: float = 1e-5) -> None:
    shares = pool.run(ranks, run_share, call)
    tokens = np.concatenate([tokens for tokens, _ in shares])
    assert sorted(tokens.tolist()) == list(range(call.mask.num_tokens))
    names = ("output", "query gradient", "key gradient", "value gradient", "sinks gradient")
    for place, (name, expected) in enumerate(zip(names, run_alone(call))):
        parts = [results[place] for _, results in shares]
        if name == "sinks gradient":
            found = torch.stack(parts).sum(0)
        else:
            found = torch.empty_like(expected)
            found[torch.from_numpy(tokens)] = torch.cat(parts)
        # Float32 sums of the same terms in another order; values are of order one.
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("ranks", [*(pytest.param(few, marks=pytest.mark.slow) for few in (2, 4)), 3])
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_every_mask_kind_equals_one_process(pool: RankPool, kind: str, ranks: int) -> None:
    row = ROW if kind != "prepended" else RowLayout.of_samples([[("image", 40), ("text", 37)], [("text", 11)]])
    check(pool, ranks, make_call(build_mask(row, kind), ranks))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_placement_equals_one_process(pool: RankPool, policy: str) -> None:
    check(pool, 4, make_call(build_mask(ROW, "embedded"), 4, policy))


@pytest.mark.parametrize(
    "tokens", [1, 16, 65, *(pytest.param(count, marks=pytest.mark.slow) for count in (15, 17, 63, 64))]
)
def test_ragged_rows_and_ranks_without_tokens_equal_one_process(pool: RankPool, tokens: int) -> None:
    mask = build_mask(RowLayout.of_lengths([tokens // 3, tokens - tokens // 3]), "document_causal")
    check(pool, 4, make_call(mask, 4))


@given(mask=masks(), ranks=st.integers(1, 4), seed=st.integers(0, 2**16))
@settings(max_examples=10, deadline=None, print_blob=True)
def test_drawn_rows_equal_one_process(pool: RankPool, mask: AttentionMask, ranks: int, seed: int) -> None:
    if mask.num_tokens:
        check(pool, ranks, make_call(mask, ranks, policy=POLICIES[seed % 3], seed=seed))


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (5, 1), (10, 5)])
@pytest.mark.parametrize("heads_per_gather", [pytest.param(None, marks=pytest.mark.slow), 1, 2])
def test_heads_may_be_gathered_in_any_groups(
    pool: RankPool, heads: tuple[int, int], heads_per_gather: int | None
) -> None:
    call = make_call(build_mask(ROW, "embedded"), 3, heads=heads, heads_per_gather=heads_per_gather)
    check(pool, 3, call)


def test_softcaps_sinks_and_layer_windows_equal_one_process(pool: RankPool) -> None:
    mask = build_mask(ROW, "bidirectional_instances")
    check(pool, 3, make_call(mask, 3, sinks=True, softcap=1.5, layer_window=20))


def test_bfloat16_gradients_are_summed_in_float32(pool: RankPool) -> None:
    call = make_call(build_mask(ROW, "embedded"), 4, dtype=torch.bfloat16)
    check(pool, 4, call, tolerance=2**-6)  # roundings of sums to 8 bits


def test_float64_gradients_are_not_summed_in_less(pool: RankPool) -> None:
    call = make_call(build_mask(ROW, "embedded"), 4, dtype=torch.float64)
    check(pool, 4, call, tolerance=1e-12)  # float64 sums in another order; float32 would leave 1e-7


def test_key_blocks_of_a_share_stay_as_exact_as_those_of_the_row() -> None:
    """Ranks are laid side by side in whole blocks, so gathering splits no block of the row in two."""

    class Group:
        index = 1
        ranks = range(4)

    mask = build_mask(RowLayout.of_samples([[("text", 40), ("image", 88)] * 4]), "embedded")
    placement = place_blocks(block_workloads(mask, BLOCK), 4)
    share = ContextParallelRow(mask, placement, Group(), block=BLOCK)
    whole, mine = block_table(mask, BLOCK), placement.blocks_of_rank(1)
    table = share.plan.table(BLOCK, BLOCK)
    assert table.full_blocks.tolist() == whole.full_blocks[mine].tolist()
    assert table.partial_blocks.tolist() == whole.partial_blocks[mine].tolist()


def run_model_share(group: Among, call: Call, inputs: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    from cases.models.tiny_families import language_model
    from dilatant.attention.hook import use_dilatant_attention

    model = use_dilatant_attention(language_model("gemma2"))
    placement = Placement(call.rank_of_block, np.zeros(len(group.ranks)), 0.0)
    share = ContextParallelRow(call.mask, placement, group, block=BLOCK)
    positions = share.take(torch.tensor(call.positions).long())[None]
    own = share.take(inputs)[None]
    return share.tokens, model(input_ids=own, position_ids=positions, attention_plan=share, use_cache=False).logits[
        0
    ].detach()


def test_a_model_with_a_share_computes_its_tokens_of_the_row(pool: RankPool) -> None:
    """Windows, soft caps and grouped heads come from the model; every layer talks to the other ranks."""
    from cases.models.tiny_families import language_model

    lengths = (37, 20, 41)
    inputs = torch.randint(3, 48, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    call = make_call(build_mask(RowLayout.of_lengths(lengths), "document_causal"), 3)
    shares = pool.run(3, run_model_share, call, inputs)
    model = language_model("gemma2")
    expected = torch.cat([model(input_ids=sample[None], use_cache=False).logits[0] for sample in inputs.split(lengths)])
    found = torch.empty_like(expected)
    for tokens, logits in shares:
        found[torch.from_numpy(tokens)] = logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)  # float32, four layers, another order of sums


def test_a_placement_for_other_ranks_is_refused(pool: RankPool) -> None:
    call = make_call(build_mask(ROW, "causal"), 3)
    with pytest.raises(AssertionError, match="placed on 2 ranks, the group has 3"):
        pool.run(3, place_for_two, call)


def place_for_two(group: Among, call: Call) -> None:
    ContextParallelRow(call.mask, Placement(call.rank_of_block % 2, np.zeros(2), 0.0), group, block=BLOCK)


def test_backends_without_a_backward_of_their_own_are_refused(pool: RankPool) -> None:
    call = make_call(build_mask(RowLayout.of_lengths([20]), "causal"), 1)
    with pytest.raises(AssertionError, match="attention backend 'sdpa' has no separate backward"):
        pool.run(1, ask_for_sdpa, call)


def ask_for_sdpa(group: Among, call: Call) -> None:
    share = ContextParallelRow(call.mask, Placement(call.rank_of_block, np.zeros(1), 0.0), group, block=BLOCK)
    context_parallel_attention(call.query, call.key, call.value, share, backend="sdpa")
