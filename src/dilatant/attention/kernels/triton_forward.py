"""Forward kernel: one unit of a work list times one query head, with a running softmax in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

from dilatant.attention.kernels.triton_parts import (
    LN_2,
    LOG2_E,
    SIZES,
    bounded,
    load_tile,
    load_words,
    unit_and_head,
    visible,
)


@triton.jit
def _visit(
    peak,
    total,
    sums,
    q,
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
    """Update the running softmax `(peak, total, sums)` with some intervals' keys; reads only keys and values if
    unmasked."""
    for i in range(first, end):
        begin = tl.load(intervals + 2 * i)
        stop = tl.load(intervals + 2 * i + 1)
        for column in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            k = load_tile(
                key, column, kv_head, key_stride_token, key_stride_head, key_tokens,
                BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            score = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), inner, SOFTCAP)
            if MASKED:
                k_low, k_high, k_position = load_words(key_fields, key_positions, column, key_tokens, BLOCK_N)
                seen = visible(
                    q_low[:, None], q_high[:, None], q_position[:, None],
                    k_low[None, :], k_high[None, :], k_position[None, :],
                    window, TOGETHER, WINDOWED,
                )  # fmt: skip
                score = tl.where(seen, score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1) * outer)
            floor = new_peak
            if MASKED:
                floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp2(score * outer - floor[:, None])
            decay = tl.exp2(peak - floor)
            total = total * decay + tl.sum(weight, 1)
            sums = sums * decay[:, None]
            v = load_tile(
                value, column, kv_head, value_stride_token, value_stride_head, key_tokens,
                BLOCK_N, HEAD_DIM, BLOCK_DIM, TMA, MASKED,
            )  # fmt: skip
            sums = tl.dot(weight.to(v.dtype), v, sums, input_precision=PRECISION)
            peak = new_peak
    return peak, total, sums


@triton.jit
def _finish(peak, total, sums):
    """Return the softmax's result and the base-2 logarithm of its sum: 0 and -inf where nothing was seen."""
    some = total > 0
    total = tl.where(some, total, 1.0)
    return sums / total[:, None], tl.where(some, peak + tl.log2(total), float("-inf"))


@triton.jit
def _store(
    output,
    logsumexp,
    sinks,
    result,
    log_total,
    rows,
    head,
    query_tokens,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Apply the head's sink, and write whole rows."""
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(log_total, sink)
        with_sink = top + tl.log2(tl.exp2(log_total - top) + tl.exp2(sink - top))
        result = result * tl.exp2(log_total - with_sink)[:, None]
        log_total = tl.where(log_total == float("-inf"), log_total, with_sink)
    dims = tl.arange(0, BLOCK_DIM)
    exist = rows < query_tokens
    tl.store(logsumexp + tl.cast(head, tl.int64) * query_tokens + rows, log_total * LN_2, mask=exist)
    address = output + (rows.to(tl.int64)[:, None] * QUERY_HEADS + head) * HEAD_DIM + dims[None, :]
    tl.store(address, result.to(output.dtype.element_ty), mask=exist[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    query,
    key,
    value,
    output,
    logsumexp,
    partial_output,
    partial_logsumexp,
    sinks,
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
    inner,
    outer,
    query_stride_token,
    query_stride_head,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
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
    SINKS: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write `output` `[query_tokens, QUERY_HEADS, HEAD_DIM]` and natural `logsumexp` `[QUERY_HEADS, query_tokens]`.

    Units with a slot write `partial_output` `[slots, QUERY_HEADS, ROW_BLOCK, HEAD_DIM]` and, in base 2,
    `partial_logsumexp` `[slots, QUERY_HEADS, ROW_BLOCK]` instead.
    """
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
    q_low, q_high, q_position = load_words(query_fields, query_positions, row, query_tokens, BLOCK_M)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    peak, total, sums = _visit(
        peak, total, sums, q, q_low, q_high, q_position, key, value, key_fields, key_positions,
        intervals, first, end_full, head // GROUP, key_tokens, window, inner, outer,
        key_stride_token, key_stride_head, value_stride_token, value_stride_head,
        HEAD_DIM, BLOCK_DIM, BLOCK_N, False, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
    )  # fmt: skip
    peak, total, sums = _visit(
        peak, total, sums, q, q_low, q_high, q_position, key, value, key_fields, key_positions,
        intervals, end_full, end_partial, head // GROUP, key_tokens, window, inner, outer,
        key_stride_token, key_stride_head, value_stride_token, value_stride_head,
        HEAD_DIM, BLOCK_DIM, BLOCK_N, True, TOGETHER, WINDOWED, SOFTCAP, TMA, PRECISION, STAGES,
    )  # fmt: skip

    result, log_total = _finish(peak, total, sums)
    inside = part * BLOCK_M + tl.arange(0, BLOCK_M)
    if slot >= 0:
        dims = tl.arange(0, BLOCK_DIM)
        place = (slot.to(tl.int64) * QUERY_HEADS + head) * ROW_BLOCK + inside
        tl.store(partial_logsumexp + place, log_total)
        address = partial_output + place[:, None] * HEAD_DIM + dims[None, :]
        tl.store(address, result, mask=(dims < HEAD_DIM)[None, :])
    else:
        _store(
            output, logsumexp, sinks, result, log_total, row_block * ROW_BLOCK + inside, head, query_tokens,
            QUERY_HEADS, HEAD_DIM, BLOCK_DIM, SINKS,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def join_forward_kernel(
    output,
    logsumexp,
    partial_output,
    partial_logsumexp,
    sinks,
    splits,
    query_tokens,
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the partial results of split rows, in the order of their slots. Grid: splits, heads, parts."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    row_block = tl.load(splits + 3 * split)
    first = tl.load(splits + 3 * split + 1)
    end = tl.load(splits + 3 * split + 2)
    inside = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_DIM)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for slot in range(first, end):
        place = (tl.cast(slot, tl.int64) * QUERY_HEADS + head) * ROW_BLOCK + inside
        log_part = tl.load(partial_logsumexp + place)
        address = partial_output + place[:, None] * HEAD_DIM + dims[None, :]
        part_result = tl.load(address, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        new_peak = tl.maximum(peak, log_part)
        floor = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - floor)
        weight = tl.exp2(log_part - floor)
        total = total * decay + weight
        sums = sums * decay[:, None] + part_result * weight[:, None]
        peak = new_peak

    result, log_total = _finish(peak, total, sums)
    _store(
        output, logsumexp, sinks, result, log_total, row_block * ROW_BLOCK + inside, head, query_tokens,
        QUERY_HEADS, HEAD_DIM, BLOCK_DIM, SINKS,
    )  # fmt: skip
