"""Backward kernels: gradients of queries by rows of the table, of keys and values by its columns.

They use seven matrix products instead of the five of a fused backward, but no atomics: equal inputs give equal bits,
and each direction is balanced by its own work list. The columns' kernel computes scores transposed, keys by queries, so
that no accumulator is ever transposed (the product of a transposed accumulator has been miscompiled for Hopper).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dilatant.attention.kernels.triton_parts import (
    LOG2_E,
    SIZES,
    bounded,
    load_tile,
    load_words,
    unit_and_head,
    visible,
)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    output,
    grad_output,
    delta,
    query_tokens,
    output_stride_token,
    output_stride_head,
    grad_stride_token,
    grad_stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute `delta` `[heads, query_tokens]`: output times its gradient, summed over channels. Grid: blocks, heads."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    exist = rows < query_tokens
    loaded = exist[:, None] & (dims < HEAD_DIM)[None, :]
    at = rows.to(tl.int64)[:, None] * output_stride_token + tl.cast(head, tl.int64) * output_stride_head + dims[None, :]
    grad_at = (
        rows.to(tl.int64)[:, None] * grad_stride_token + tl.cast(head, tl.int64) * grad_stride_head + dims[None, :]
    )
    o = tl.load(output + at, mask=loaded, other=0.0).to(tl.float32)
    g = tl.load(grad_output + grad_at, mask=loaded, other=0.0).to(tl.float32)
    tl.store(delta + tl.cast(head, tl.int64) * query_tokens + rows, tl.sum(o * g, 1), mask=exist)


@triton.jit
def _load_row_numbers(logsumexp, delta, row, head, query_tokens, ROWS: tl.constexpr):
    """Load base-2 logsumexp and delta of `ROWS` queries; +inf (all weights 0) where a query sees nothing."""
    rows = row + tl.arange(0, ROWS)
    exist = rows < query_tokens
    at = tl.cast(head, tl.int64) * query_tokens + rows
    log_total = tl.load(logsumexp + at, mask=exist, other=float("-inf")) * LOG2_E
    log_total = tl.where(log_total == float("-inf"), float("inf"), log_total)
    return log_total, tl.load(delta + at, mask=exist, other=0.0)


@triton.jit
def _visit_keys(
    grad,
    q,
    g,
    log_total,
    row_delta,
    q_low,
    q_high,
    q_position,
    key,
    value,
    key_fields,
    key_positions,
    intervals,
    first,
    end,
    kv_head,
    key_tokens,
    window,
    inner,
    outer,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    for i in range(first, end):
        begin = tl.load(intervals + 2 * i)
        stop = tl.load(intervals + 2 * i + 1)
        for column in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            k = load_tile(
                key, column, kv_head, key_stride_token, key_stride_head, key_tokens,
                BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            v = load_tile(
                value, column, kv_head, value_stride_token, value_stride_head, key_tokens,
                BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            score = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), inner, SOFTCAP)
            weight = tl.exp2(score * outer - log_total[:, None])
            if MASKED:
                k_low, k_high, k_position = load_words(key_fields, key_positions, column, key_tokens, BLOCK_N)
                seen = visible(
                    q_low[:, None], q_high[:, None], q_position[:, None],
                    k_low[None, :], k_high[None, :], k_position[None, :],
                    window, TOGETHER, WINDOWED,
                )  # fmt: skip
                weight = tl.where(seen, weight, 0.0)
            if SOFTCAP:
                weight = weight * (1.0 - score * score)
            grad_score = weight * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - row_delta[:, None])
            grad = tl.dot(grad_score.to(k.dtype), k, grad, input_precision=PRECISION)
    return grad


@triton.jit(do_not_specialize=SIZES)
def grad_query_kernel(
    query,
    key,
    value,
    grad_output,
    logsumexp,
    delta,
    grad_query,
    partial_grad,
    units,
    intervals,
    query_fields,
    query_positions,
    key_fields,
    key_positions,
    num_units,
    section,
    query_tokens,
    key_tokens,
    window,
    scale,
    inner,
    outer,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    grad_stride_token,
    grad_stride_head,
    QUERY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write `grad_query` `[query_tokens, QUERY_HEADS, HEAD_DIM]`; units with a slot write their part of the sum to
    `partial_grad` `[slots, QUERY_HEADS, ROW_BLOCK, HEAD_DIM]` instead."""
    unit, part, head = unit_and_head(num_units, section, ROW_BLOCK // BLOCK_M)
    row_block = tl.load(units + unit * 5)
    first = tl.load(units + unit * 5 + 1)
    end_full = tl.load(units + unit * 5 + 2)
    end_partial = tl.load(units + unit * 5 + 3)
    slot = tl.load(units + unit * 5 + 4)
    row = row_block * ROW_BLOCK + part * BLOCK_M
    q = load_tile(
        query, row, head, query_stride_token, query_stride_head, query_tokens,
        BLOCK_M, HEAD_DIM, BLOCK_DIM, TMA, True,
    )  # fmt: skip
    g = load_tile(
        grad_output, row, head, grad_stride_token, grad_stride_head, query_tokens,
        BLOCK_M, HEAD_DIM, BLOCK_DIM, TMA, True,
    )  # fmt: skip
    log_total, row_delta = _load_row_numbers(logsumexp, delta, row, head, query_tokens, BLOCK_M)
    q_low, q_high, q_position = load_words(query_fields, query_positions, row, query_tokens, BLOCK_M)

    grad = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    grad = _visit_keys(
        grad, q, g, log_total, row_delta, q_low, q_high, q_position, key, value, key_fields, key_positions,
        intervals, first, end_full, head // GROUP, key_tokens, window, inner, outer,
        key_stride_token, key_stride_head, value_stride_token, value_stride_head,
        HEAD_DIM, BLOCK_DIM, BLOCK_N, False, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    grad = _visit_keys(
        grad, q, g, log_total, row_delta, q_low, q_high, q_position, key, value, key_fields, key_positions,
        intervals, end_full, end_partial, head // GROUP, key_tokens, window, inner, outer,
        key_stride_token, key_stride_head, value_stride_token, value_stride_head,
        HEAD_DIM, BLOCK_DIM, BLOCK_N, True, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    inside = part * BLOCK_M + tl.arange(0, BLOCK_M)
    _store_grad(
        grad_query, partial_grad, grad * scale, row_block, inside, head, slot, query_tokens,
        QUERY_HEADS, HEAD_DIM, BLOCK_DIM, ROW_BLOCK,
    )  # fmt: skip


@triton.jit
def _store_grad(
    grad,
    partial_grad,
    result,
    row_block,
    inside,
    head,
    slot,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_DIM)
    if slot >= 0:
        place = (slot.to(tl.int64) * HEADS + head) * ROW_BLOCK + inside
        part_address = partial_grad + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_address, result, mask=(dims < HEAD_DIM)[None, :])
    else:
        rows = row_block * ROW_BLOCK + inside
        address = grad + (rows.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
        stored = (rows < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(address, result.to(grad.dtype.element_ty), mask=stored)


@triton.jit
def _visit_queries(
    grad_k,
    grad_v,
    k,
    v,
    k_low,
    k_high,
    k_position,
    query,
    grad_output,
    logsumexp,
    delta,
    query_fields,
    query_positions,
    intervals,
    first,
    end,
    head,
    query_tokens,
    window,
    inner,
    outer,
    query_stride_token,
    query_stride_head,
    grad_stride_token,
    grad_stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    for i in range(first, end):
        begin = tl.load(intervals + 2 * i)
        stop = tl.load(intervals + 2 * i + 1)
        for row in tl.range(begin, stop, BLOCK_M, num_stages=STAGES):
            q = load_tile(
                query, row, head, query_stride_token, query_stride_head, query_tokens,
                BLOCK_M, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            g = load_tile(
                grad_output, row, head, grad_stride_token, grad_stride_head, query_tokens,
                BLOCK_M, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            log_total, row_delta = _load_row_numbers(logsumexp, delta, row, head, query_tokens, BLOCK_M)
            score = bounded(tl.dot(k, tl.trans(q), input_precision=PRECISION), inner, SOFTCAP)
            weight = tl.exp2(score * outer - log_total[None, :])
            if MASKED:
                q_low, q_high, q_position = load_words(query_fields, query_positions, row, query_tokens, BLOCK_M)
                seen = visible(
                    q_low[None, :], q_high[None, :], q_position[None, :],
                    k_low[:, None], k_high[:, None], k_position[:, None],
                    window, TOGETHER, WINDOWED,
                )  # fmt: skip
                weight = tl.where(seen, weight, 0.0)
            grad_v = tl.dot(weight.to(g.dtype), g, grad_v, input_precision=PRECISION)
            if SOFTCAP:
                weight = weight * (1.0 - score * score)
            grad_score = weight * (tl.dot(v, tl.trans(g), input_precision=PRECISION) - row_delta[None, :])
            grad_k = tl.dot(grad_score.to(q.dtype), q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=SIZES)
def grad_key_value_kernel(
    query,
    key,
    value,
    grad_output,
    logsumexp,
    delta,
    grad_key,
    grad_value,
    partial_grad_key,
    partial_grad_value,
    units,
    intervals,
    query_fields,
    query_positions,
    key_fields,
    key_positions,
    num_units,
    section,
    query_tokens,
    key_tokens,
    window,
    scale,
    inner,
    outer,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    grad_stride_token,
    grad_stride_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write `grad_key` and `grad_value` `[key_tokens, KV_HEADS, HEAD_DIM]`, summed over the group's query heads. Units
    with a slot write their parts of the sums to `partial_*` `[slots, KV_HEADS, ROW_BLOCK, HEAD_DIM]` instead.

    Rows of the work list are blocks of keys here; its intervals are query tokens.
    """
    unit, part, kv_head = unit_and_head(num_units, section, ROW_BLOCK // BLOCK_N)
    row_block = tl.load(units + unit * 5)
    first = tl.load(units + unit * 5 + 1)
    end_full = tl.load(units + unit * 5 + 2)
    end_partial = tl.load(units + unit * 5 + 3)
    slot = tl.load(units + unit * 5 + 4)
    column = row_block * ROW_BLOCK + part * BLOCK_N
    k = load_tile(
        key, column, kv_head, key_stride_token, key_stride_head, key_tokens,
        BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, True,
    )  # fmt: skip
    v = load_tile(
        value, column, kv_head, value_stride_token, value_stride_head, key_tokens,
        BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, True,
    )  # fmt: skip
    k_low, k_high, k_position = load_words(key_fields, key_positions, column, key_tokens, BLOCK_N)

    grad_k = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        grad_k, grad_v = _visit_queries(
            grad_k, grad_v, k, v, k_low, k_high, k_position, query, grad_output, logsumexp, delta,
            query_fields, query_positions, intervals, first, end_full, head, query_tokens, window, inner, outer,
            query_stride_token, query_stride_head, grad_stride_token, grad_stride_head,
            HEAD_DIM, BLOCK_DIM, BLOCK_M, False, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
        )  # fmt: skip
        grad_k, grad_v = _visit_queries(
            grad_k, grad_v, k, v, k_low, k_high, k_position, query, grad_output, logsumexp, delta,
            query_fields, query_positions, intervals, end_full, end_partial, head, query_tokens, window, inner,
            outer, query_stride_token, query_stride_head, grad_stride_token, grad_stride_head,
            HEAD_DIM, BLOCK_DIM, BLOCK_M, True, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
        )  # fmt: skip
    inside = part * BLOCK_N + tl.arange(0, BLOCK_N)
    _store_grad(
        grad_key, partial_grad_key, grad_k * scale, row_block, inside, kv_head, slot, key_tokens,
        KV_HEADS, HEAD_DIM, BLOCK_DIM, ROW_BLOCK,
    )  # fmt: skip
    _store_grad(
        grad_value, partial_grad_value, grad_v, row_block, inside, kv_head, slot, key_tokens,
        KV_HEADS, HEAD_DIM, BLOCK_DIM, ROW_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def add_parts_kernel(
    grad,
    partial_grad,
    splits,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the gradients of split rows, in the order of their slots. Grid: splits, heads, parts."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row_block = tl.load(splits + 3 * split)
    first = tl.load(splits + 3 * split + 1)
    end = tl.load(splits + 3 * split + 2)
    inside = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_DIM)
    total = tl.zeros([BLOCK, BLOCK_DIM], tl.float32)
    for slot in range(first, end):
        place = (tl.cast(slot, tl.int64) * HEADS + head) * ROW_BLOCK + inside
        address = partial_grad + place[:, None] * HEAD_DIM + dims[None, :]
        total += tl.load(address, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    rows = row_block * ROW_BLOCK + inside
    address = grad + (rows.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + dims[None, :]
    stored = (rows < num_tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(address, total.to(grad.dtype.element_ty), mask=stored)
