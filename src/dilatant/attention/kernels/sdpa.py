"""Attention with PyTorch's scaled_dot_product_attention, for rows whose samples are each fully visible or causal.

The cost of a row is the sum of its samples' squared lengths: samples of similar length run as one batch, padded at
their ends. Causal attention does not see the padding; full attention masks it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.scores import Scores, seen_by_none
from dilatant.attention.masks import mask as layout
from dilatant.attention.masks.mask import Runs

WASTE = 1 / 8
"""A causal sample joins a batch if its padded square grows by at most this fraction, or by at most `FREE_PAIRS`."""

FREE_PAIRS = {"cpu": 32**2, "cuda": 512**2}
"""Pairs of tokens that cost less than another call: about 0.15 ms, forward and backward, on one core; on a GPU, those
computed in the time of a launch (not measured)."""

PADDED_PAIRS = 16
"""Padding of samples with full attention adds at most this many pairs of tokens per token of the row: under 1 % of the
linear layers of an encoder, in which a token costs as much as thousands of pairs."""


class Batch(NamedTuple):
    """Samples that run in one call, each padded to `length` tokens."""

    samples: int
    length: int
    causal: bool


class SdpaBatches(NamedTuple):
    """A row as a sequence of batches: `sum(samples * length)` slots.

    `masks` has an entry per batch: bool `[samples, 1, 1, length]`, False at padding that full attention would see, or
    None. `token_of_slot` int64 `[slots]` and `slot_of_token` int64 `[tokens]` are inverse maps, with any valid index at
    padding; None if both are the identity. `unseeing` int64 lists the row's own padding, or is None.
    """

    batches: list[Batch]
    masks: list[torch.Tensor | None]
    token_of_slot: torch.Tensor | None
    slot_of_token: torch.Tensor | None
    unseeing: torch.Tensor | None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """Return the output `[tokens, query_heads, head_dim]`, zero where a query sees nothing."""
    device = query.device
    found: SdpaBatches = plan.remember(("batches", device), lambda plan: _batches(plan, device))
    if not found.batches:
        return seen_by_none(query, key, value)
    moves = found.token_of_slot is not None
    if moves:
        query, key, value = (_ToSlots.apply(part, found) for part in (query, key, value))
    sizes = [batch.samples * batch.length for batch in found.batches]
    outputs = [
        _attend_batch(batch, mask, q, k, v, scores.scale)
        for batch, mask, q, k, v in zip(
            found.batches, found.masks, *(part.split(sizes) for part in (query, key, value))
        )
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _ToTokens.apply(output, found) if moves else output


def _attend_batch(
    batch: Batch, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (part.unflatten(0, (batch.samples, -1)).transpose(1, 2) for part in (query, key, value))
    group = q.shape[1] // k.shape[1]
    if group > 1 and not _knows_groups(query, mask):
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    if mask is not None:
        mask = mask.expand(-1, -1, batch.length, -1)
    output = scaled_dot_product_attention(q, k, v, mask, is_causal=batch.causal, scale=scale, enable_gqa=group > 1)
    return output.transpose(1, 2).flatten(0, 1)


def _knows_groups(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether SDPA can run with fewer KV heads than query heads. On GPUs only flash attention can, and only in
    half precision without a mask; the other implementations would store all scores."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cpu" or (is_half and mask is None)


class _ToSlots(torch.autograd.Function):
    """Gather a row `[tokens, ...]` into slots `[slots, ...]`. The gradient is a gather too: no token has two slots, and
    padding has no gradient, since its outputs are unused."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, batches: SdpaBatches) -> torch.Tensor:
        ctx.batches = batches
        assert batches.token_of_slot is not None
        return row.index_select(0, batches.token_of_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(grad, ctx.batches), None


class _ToTokens(torch.autograd.Function):
    """Gather slots back into the row; zero at the row's own padding."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, batches: SdpaBatches) -> torch.Tensor:
        ctx.batches, ctx.num_slots = batches, slots.shape[0]
        return _to_tokens(slots, batches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        batches = ctx.batches
        slots = grad.new_zeros((ctx.num_slots + 1, *grad.shape[1:]))
        where = batches.slot_of_token
        if batches.unseeing is not None:  # into a slot that is dropped
            where = where.index_fill(0, batches.unseeing, ctx.num_slots)
        return slots.index_copy_(0, where, grad)[:-1], None


def _to_tokens(slots: torch.Tensor, batches: SdpaBatches) -> torch.Tensor:
    assert batches.slot_of_token is not None
    row = slots.index_select(0, batches.slot_of_token)
    return row if batches.unseeing is None else row.index_fill_(0, batches.unseeing, 0)


def group_samples(runs: Runs, free_pairs: int) -> list[tuple[Batch, list[tuple[int, int]]]]:
    """Return the batches of a plain row, each with the (first token, tokens) of its samples, longest first."""
    causal: list[list[tuple[int, int]]] = []
    full: list[tuple[int, int]] = []
    samples = [
        (length, start, bool(word & layout.CAUSAL) and not (word & layout.TOGETHER and word & layout.OWN))
        for start, length, word in zip(runs.start.tolist(), runs.length.tolist(), runs.field.tolist())
        if word & (layout.OWN | layout.ATTEND)
    ]
    for length, start, is_causal in sorted(samples, key=lambda sample: (-sample[0], sample[1])):
        if not is_causal:
            full.append((start, length))
            continue
        longest = causal[-1][0][1] if causal else 0
        if longest and longest**2 - length**2 <= max(free_pairs, WASTE * longest**2):
            causal[-1].append((start, length))
        else:
            causal.append([(start, length)])
    groups = [(Batch(len(each), each[0][1], True), each) for each in causal]
    groups += [(Batch(len(each), each[0][1], False), each) for each in _fewest_batches(full)]
    return sorted(groups, key=lambda group: group[1][0])


def _fewest_batches(samples: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide samples (first token, tokens), longest first, into the fewest batches that add at most `PADDED_PAIRS` per
    token; among as many batches, into those that add fewest."""
    lengths, counts = np.unique([-length for _, length in samples], return_counts=True)
    squares, before = lengths**2, np.concatenate([[0], np.cumsum(counts)])
    # From length number i to number j as one batch, padded to the longest.
    pairs = np.where(np.tri(len(squares), dtype=bool).T, squares[:, None] * (before[1:] - before[:-1, None]), np.inf)
    most = float(squares @ counts - PADDED_PAIRS * lengths @ counts)
    begins: list[NDArray[np.int64]] = []
    best = np.concatenate([[0.0], np.full(len(squares), np.inf)])
    while best[-1] > most:
        sums = best[:-1, None] + pairs
        begins.append(sums.argmin(0))
        best = np.concatenate([[np.inf], sums.min(0)])
    batches, end = [], len(squares)
    for begin in reversed(begins):
        first = int(begin[end - 1])
        batches.append(samples[before[first] : before[end]])
        end = first
    return batches


def _batches(plan: AttentionPlan, device: torch.device) -> SdpaBatches:
    num_tokens = plan.mask.num_tokens
    groups = group_samples(plan.mask.runs, FREE_PAIRS.get(device.type, FREE_PAIRS["cuda"]))
    token_of_slot: list[np.ndarray] = [np.empty(0, np.int64)]
    slot_of_token = np.full(num_tokens, -1)
    masks: list[torch.Tensor | None] = []
    slots = 0
    for batch, members in groups:
        start, length = np.array(members).T[..., None]
        # Padding repeats the sample's last token: any finite value is valid.
        tokens = start + np.minimum(np.arange(batch.length), length - 1)
        is_token = np.arange(batch.length) < length
        slot_of_token[tokens[is_token]] = slots + np.flatnonzero(is_token)
        token_of_slot.append(tokens.ravel())
        is_padded = not batch.causal and not is_token.all()
        masks.append(upload(is_token[:, None, None], device) if is_padded else None)
        slots += tokens.size
    batches = [batch for batch, _ in groups]
    forward = np.concatenate(token_of_slot)
    if np.array_equal(forward, np.arange(num_tokens)):
        return SdpaBatches(batches, masks, None, None, None)
    unseeing = np.flatnonzero(slot_of_token < 0)
    return SdpaBatches(
        batches,
        masks,
        upload(forward, device),
        upload(np.maximum(slot_of_token, 0), device),
        upload(unseeing, device) if unseeing.size else None,
    )
