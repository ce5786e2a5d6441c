"""Attention with PyTorch's scaled_dot_product_attention, for rows whose samples are each fully visible or causal.

The cost of a row is the sum of its samples' squared lengths: samples of similar length run as one batch, padded at
their ends, where causal attention does not see the padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks import mask as layout
from dilatant.attention.masks.mask import Runs

WASTE = 1 / 8
"""A sample joins a batch if its padded square grows by at most this fraction, or by at most `FREE_PAIRS`."""

FREE_PAIRS = {"cpu": 32**2, "cuda": 512**2}
"""Pairs of tokens that cost less than another call: about 0.15 ms, forward and backward, on one core; on a GPU, those
computed in the time of a launch (not measured)."""


class Batch(NamedTuple):
    """Samples that run in one call, each padded to `length` tokens."""

    samples: int
    length: int
    causal: bool


class SdpaBatches(NamedTuple):
    """A row as a sequence of batches: `sum(samples * length)` slots.

    `token_of_slot` int64 `[slots]` and `slot_of_token` int64 `[tokens]` are inverse maps, with any valid index at
    padding; None if both are the identity. `unseeing` int64 lists the row's own padding, or is None.
    """

    batches: list[Batch]
    token_of_slot: torch.Tensor | None
    slot_of_token: torch.Tensor | None
    unseeing: torch.Tensor | None


def why_not_plain(plan: AttentionPlan) -> str | None:
    """Return why the mask is not one full or causal block per sample; None if it is."""
    return plan.remember("why not plain", _why_not_plain)


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
        return _nothing(query, key, value)
    moves = found.token_of_slot is not None
    if moves:
        query, key, value = (_ToSlots.apply(part, found) for part in (query, key, value))
    sizes = [batch.samples * batch.length for batch in found.batches]
    outputs = [
        _attend_batch(batch, q, k, v, scores.scale)
        for batch, q, k, v in zip(found.batches, *(part.split(sizes) for part in (query, key, value)))
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _ToTokens.apply(output, found) if moves else output


def _attend_batch(
    batch: Batch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (part.unflatten(0, (batch.samples, -1)).transpose(1, 2) for part in (query, key, value))
    group = q.shape[1] // k.shape[1]
    if group > 1 and not _knows_groups(query):
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    output = scaled_dot_product_attention(q, k, v, is_causal=batch.causal, scale=scale, enable_gqa=group > 1)
    return output.transpose(1, 2).flatten(0, 1)


def _knows_groups(query: torch.Tensor) -> bool:
    """Return whether SDPA can run with fewer KV heads than query heads. On GPUs only flash attention can, and only in
    half precision; the other implementations would store all scores."""
    return query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16)


def _nothing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return zeros that depend on all three inputs: a row of padding needs gradients as well."""
    zero = key.sum() * 0 + value.sum() * 0
    return query[..., :1].expand(*query.shape[:2], value.shape[2]) * 0 + zero


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


def _why_not_plain(plan: AttentionPlan) -> str | None:
    if plan.keys is not plan.mask:
        return "the keys are not the queries' own row"
    runs, window = plan.mask.runs, plan.mask.window
    samples = set()
    for start, length, word in zip(runs.start.tolist(), runs.length.tolist(), runs.field.tolist()):
        own, attended = word & layout.OWN, (word & layout.ATTEND) >> layout.ATTEND_SHIFT
        if not own and not attended:
            continue
        sample = (word & layout.SAMPLE) >> layout.SAMPLE_SHIFT
        if sample in samples:
            return f"the tokens of sample {sample} attend in more than one way (from token {start} on)"
        samples.add(sample)
        if not (own & attended) and not (word & layout.TOGETHER and own):
            return f"tokens from {start} on do not attend to their own modality"
        if word & layout.WINDOW and window is not None and window < length:
            return f"sample {sample} of {length} tokens is held to a window of {window}"
    return None


def group_samples(runs: Runs, free_pairs: int) -> list[tuple[Batch, list[tuple[int, int]]]]:
    """Return the batches of a plain row, each with the (first token, tokens) of its samples, longest first. Samples
    with full attention share a batch only with others of their length, since they would see padding."""
    samples = [
        (bool(word & layout.CAUSAL) and not (word & layout.TOGETHER and word & layout.OWN), length, start)
        for start, length, word in zip(runs.start.tolist(), runs.length.tolist(), runs.field.tolist())
        if word & (layout.OWN | layout.ATTEND)
    ]
    groups: list[tuple[bool, int, list[tuple[int, int]]]] = []
    for causal, length, start in sorted(samples, key=lambda sample: (sample[0], -sample[1], sample[2])):
        if groups and groups[-1][0] == causal:
            _, longest, members = groups[-1]
            waste = longest**2 - length**2
            if waste == 0 or (causal and waste <= max(free_pairs, WASTE * longest**2)):
                members.append((start, length))
                continue
        groups.append((causal, length, [(start, length)]))
    groups.sort(key=lambda group: group[2][0])
    return [(Batch(len(members), length, causal), members) for causal, length, members in groups]


def _batches(plan: AttentionPlan, device: torch.device) -> SdpaBatches:
    num_tokens = plan.mask.num_tokens
    groups = group_samples(plan.mask.runs, FREE_PAIRS.get(device.type, FREE_PAIRS["cuda"]))
    token_of_slot: list[np.ndarray] = [np.empty(0, np.int64)]
    slot_of_token = np.full(num_tokens, -1)
    first = 0
    for batch, members in groups:
        for start, length in members:
            # Padding repeats the sample's last token: any finite value is valid.
            token_of_slot.append(start + np.minimum(np.arange(batch.length), length - 1))
            slot_of_token[start : start + length] = first + np.arange(length)
            first += batch.length
    batches = [batch for batch, _ in groups]
    forward = np.concatenate(token_of_slot)
    if np.array_equal(forward, np.arange(num_tokens)):
        return SdpaBatches(batches, None, None, None)
    unseeing = np.flatnonzero(slot_of_token < 0)
    return SdpaBatches(
        batches,
        upload(forward, device),
        upload(np.maximum(slot_of_token, 0), device),
        upload(unseeing, device) if unseeing.size else None,
    )
