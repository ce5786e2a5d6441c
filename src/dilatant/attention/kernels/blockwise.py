"""Blockwise attention in plain PyTorch, over the same tables as the GPU kernels: for CPUs, and as a reference.

Memory is proportional to tokens: one block of queries meets one chunk of keys at a time, with a running softmax (Rabe
and Staats 2021; Dao et al. 2022), and the backward pass recomputes the scores. Sums are in float32, or in float64 for
float64 inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan, MaskTensors
from dilatant.attention.kernels.scores import Gradients, Scores
from dilatant.attention.masks import mask as layout
from dilatant.attention.masks.blocks import BlockKind

QUERY_BLOCK = 128
KEY_BLOCK = 128
CHUNK_TOKENS = 2048

KEPT_PAIRS = 1 << 26
"""Maximum size of the masks of partial blocks that a plan caches for other layers and backward: pairs (bytes)."""


class Chunk(NamedTuple):
    """Keys that a block of queries visits in one step. `hidden` is a function that returns the mask of hidden pairs,
    because the mask may be large; None if the queries see all keys."""

    slices: list[slice]
    hidden: Callable[[], torch.Tensor] | None


class Block(NamedTuple):
    """A block of query tokens and the keys it visits."""

    queries: slice
    chunks: list[Chunk]


def _in_their_precision(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `kernel` to run without autocast, which would compute its float32 sums in half precision."""

    @functools.wraps(kernel)
    def run(tensor: torch.Tensor, *rest: Any) -> Any:
        with torch.autocast("cpu" if tensor.is_meta else tensor.device.type, enabled=False):
            return kernel(tensor, *rest)

    return run


@_in_their_precision
def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, `[tokens, query_heads, head_dim]` in the query's dtype, and the logarithm of each softmax's
    sum. That is `[query_heads, tokens]` in the dtype of the sums. They are 0 and -inf where a query sees nothing."""
    tokens, query_heads, _ = query.shape
    kv_heads = key.shape[1]
    dtype = accumulation_dtype(query)
    output = query.new_zeros(tokens, query_heads, value.shape[2])
    if output.shape == query.shape:
        output = torch.zeros_like(query)  # in memory as queries, like PyTorch's
    logsumexp = torch.full((query_heads, tokens), -math.inf, dtype=dtype, device=query.device)
    for block in _blocks(plan, query.device):
        rows = _rows(query, block.queries, kv_heads, dtype) * scores.scale
        peak = torch.full((*rows.shape[:2], 1), -math.inf, dtype=dtype, device=query.device)
        total = torch.zeros_like(peak)
        sums = torch.zeros((*rows.shape[:2], value.shape[2]), dtype=dtype, device=query.device)
        for slices, hidden in block.chunks:
            score, _ = _scored(rows, _columns(key, slices, dtype), hidden, scores)
            new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
            floor = new_peak.masked_fill(new_peak == -math.inf, 0)
            weight = score.sub_(floor).exp_()
            decay = (peak - floor).exp_()
            total.mul_(decay).add_(weight.sum(-1, keepdim=True))
            sums.mul_(decay).add_(weight @ _columns(value, slices, dtype))
            peak = new_peak
        log_total = (peak + total.log()).masked_fill_(total == 0, -math.inf)
        if sinks is not None:
            sink = _per_row(sinks.to(dtype), rows, kv_heads)
            with_sink = torch.logaddexp(log_total, sink).masked_fill_(total == 0, -math.inf)
            sums.mul_((log_total - with_sink.masked_fill(total == 0, 0)).exp_())
            log_total = with_sink
        sums.div_(total.masked_fill(total == 0, 1))
        output[block.queries] = _tokens_first(sums, query_heads).to(output.dtype)
        logsumexp[:, block.queries] = log_total.view(query_heads, -1)
    return output, logsumexp


@_in_their_precision
def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    plan: AttentionPlan,
    scores: Scores,
) -> Gradients:
    """Return gradients of query, key, value and sinks in the dtypes of their inputs, from the results of `forward`."""
    query_heads, kv_heads = query.shape[1], key.shape[1]
    dtype = accumulation_dtype(query)
    grad_query = torch.zeros_like(query)
    grad_key = torch.zeros(key.shape, dtype=dtype, device=key.device)
    grad_value = torch.zeros(value.shape, dtype=dtype, device=value.device)
    delta = (grad_output.to(dtype) * output.to(dtype)).sum(-1).t()
    for block in _blocks(plan, query.device):
        rows = _rows(query, block.queries, kv_heads, dtype) * scores.scale
        grad_rows = _rows(grad_output, block.queries, kv_heads, dtype)
        ceiling = logsumexp[:, block.queries].reshape(kv_heads, -1, 1)
        ceiling = ceiling.masked_fill(ceiling == -math.inf, math.inf)
        block_delta = delta[:, block.queries].reshape(kv_heads, -1, 1)
        grad_sums = torch.zeros_like(rows)
        for slices, hidden in block.chunks:
            columns = _columns(key, slices, dtype)
            score, slope = _scored(rows, columns, hidden, scores)
            weight = score.sub_(ceiling).exp_()
            _scatter_add(grad_value, slices, weight.mT @ grad_rows)
            grad_score = weight.mul_((grad_rows @ _columns(value, slices, dtype).mT).sub_(block_delta))
            if slope is not None:
                grad_score.mul_(slope)
            grad_sums += grad_score @ columns
            _scatter_add(grad_key, slices, grad_score.mT @ rows)
        grad_query[block.queries] = _tokens_first(grad_sums.mul_(scores.scale), query_heads).to(query.dtype)
    grad_sinks = None if sinks is None else sink_gradient(sinks, logsumexp, delta)
    return Gradients(grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks)


def sink_gradient(sinks: torch.Tensor, logsumexp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks `[query_heads]`: a sink adds to every softmax's sum but has no value. `delta` is
    the sum over channels of output times its gradient, `[query_heads, tokens]`."""
    share = (sinks.to(logsumexp.dtype)[:, None] - logsumexp).exp().masked_fill(logsumexp == -math.inf, 0)
    return -(share * delta).sum(1).to(sinks.dtype)


def accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _blocks(plan: AttentionPlan, device: torch.device) -> list[Block]:
    """Return every block of queries that sees anything, in chunks of at most `CHUNK_TOKENS` keys; the plan caches them.
    Tensors without values have none."""
    if device.type == "meta":
        return []
    sizes = (QUERY_BLOCK, KEY_BLOCK, CHUNK_TOKENS)
    return plan.remember(("blockwise", device, *sizes), lambda plan: _make_blocks(plan, device))


def _make_blocks(plan: AttentionPlan, device: torch.device) -> list[Block]:
    table = plan.table(QUERY_BLOCK, KEY_BLOCK)
    words = plan.tensors(device)
    pairs = int(table.partial_blocks.sum()) * QUERY_BLOCK * KEY_BLOCK
    ends = np.minimum((table.start.astype(np.int64) + table.length) * KEY_BLOCK, table.column_tokens).tolist()
    starts = (table.start.astype(np.int64) * KEY_BLOCK).tolist()
    partial = (table.kind == BlockKind.PARTIAL).tolist()
    blocks = []
    for row, (low, high) in enumerate(itertools.pairwise(table.offsets.tolist())):
        queries = slice(row * QUERY_BLOCK, min((row + 1) * QUERY_BLOCK, table.row_tokens))
        chunks = [
            Chunk(slices, None) for slices in _chunks((starts[i], ends[i]) for i in range(low, high) if not partial[i])
        ]
        for slices in _chunks((starts[i], ends[i]) for i in range(low, high) if partial[i]):
            hidden = functools.partial(_hidden, words, queries, slices, plan.mask.window)
            chunks.append(Chunk(slices, functools.cache(hidden) if pairs <= KEPT_PAIRS else hidden))
        if chunks:
            blocks.append(Block(queries, chunks))
    return blocks


def _chunks(intervals: Iterable[tuple[int, int]]) -> Iterator[list[slice]]:
    """Divide intervals of tokens into lists of at most `CHUNK_TOKENS` tokens each."""
    chunk: list[slice] = []
    room = CHUNK_TOKENS
    for at, end in intervals:
        while at < end:
            stop = min(end, at + room)
            chunk.append(slice(at, stop))
            room -= stop - at
            at = stop
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_TOKENS
    if chunk:
        yield chunk


def visible_pairs(
    query_fields: torch.Tensor,
    key_fields: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Apply the rule of `mask.visible` elementwise: bool of the common shape to which the arguments broadcast."""
    differing = query_fields ^ key_fields
    same_instance = (differing & layout.INSTANCE) == 0
    alike = (query_fields & key_fields & layout.OWN) != 0
    together = ((query_fields & layout.TOGETHER) != 0) & alike & same_instance
    attended = ((query_fields >> layout.ATTEND_SHIFT) & key_fields & layout.OWN) != 0
    behind = query_positions - key_positions
    causal = (query_fields & layout.CAUSAL) != 0
    seen = (attended & (~causal | (behind >= 0))) | together
    seen = seen & ((differing & layout.SAMPLE) == 0)
    seen = seen & (((query_fields & layout.LOCAL) == 0) | same_instance)
    if window is not None:
        inside = (behind < window) & (causal | (behind > -window))
        seen = seen & (((query_fields & layout.WINDOW) == 0) | inside)
    return seen


def _hidden(words: MaskTensors, queries: slice, slices: list[slice], window: int | None) -> torch.Tensor:
    return ~visible_pairs(
        words.query_fields[queries, None],
        torch.cat([words.key_fields[part] for part in slices]),
        words.query_positions[queries, None],
        torch.cat([words.key_positions[part] for part in slices]),
        window,
    )


def _scored(
    rows: torch.Tensor, columns: torch.Tensor, hidden: Callable[[], torch.Tensor] | None, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scores `[kv_heads, group * queries, keys]` of scaled queries, -inf where hidden, and the slope of the soft
    cap if there is one."""
    score = rows @ columns.mT
    slope = None
    if scores.softcap is not None:
        capped = (score / scores.softcap).tanh_()
        slope = 1 - capped * capped
        score = capped.mul_(scores.softcap)
    if hidden is not None:
        pairs = hidden()
        score.view(score.shape[0], -1, *pairs.shape).masked_fill_(pairs, -math.inf)
    return score, slope


def _rows(tensor: torch.Tensor, tokens: slice, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return some tokens as `[kv_heads, group * tokens, dim]`: query heads of one KV head are stacked along tokens."""
    part = tensor[tokens].to(dtype)
    return part.view(part.shape[0], kv_heads, -1, part.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)


def _tokens_first(rows: torch.Tensor, query_heads: int) -> torch.Tensor:
    """Invert `_rows`: `[tokens, query_heads, dim]`."""
    return rows.view(query_heads, -1, rows.shape[2]).transpose(0, 1)


def _per_row(per_head: torch.Tensor, rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Repeat one number per query head to `[kv_heads, group * tokens, 1]`."""
    repeats = rows.shape[1] * kv_heads // per_head.shape[0]
    return per_head.view(kv_heads, -1).repeat_interleave(repeats, dim=1)[..., None]


def _columns(tensor: torch.Tensor, slices: list[slice], dtype: torch.dtype) -> torch.Tensor:
    """Return some tokens as `[kv_heads, tokens, dim]`."""
    parts = [tensor[part] for part in slices]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype).transpose(0, 1)


def _scatter_add(total: torch.Tensor, slices: list[slice], addend: torch.Tensor) -> None:
    """Add `[kv_heads, tokens, dim]` to the slices of `[tokens, kv_heads, dim]` it was gathered from."""
    done = 0
    for part in slices:
        size = part.stop - part.start
        total[part] += addend[:, done : done + size].transpose(0, 1)
        done += size
