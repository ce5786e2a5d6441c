"""Functions shared by the Triton attention kernels: work of a program, tiles of tokens, the mask, the scores."""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ["num_units", "section", "query_tokens", "key_tokens", "num_tokens", "window"]
"""Arguments that differ from row to row: kernels must not be specialised on their divisors."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

# The 64-bit word of `attention.masks.mask` as two 32-bit halves, so that pairs of tokens need no 64-bit arithmetic.
_MODALITIES = tl.constexpr(0xFFF)
_ATTEND_SHIFT = tl.constexpr(12)
_TOGETHER = tl.constexpr(1 << 24)
_INSTANCE = tl.constexpr(0xFFFF)
_SAMPLE = tl.constexpr(0xFFF << 16)
_WINDOW = tl.constexpr(1 << 28)
_LOCAL = tl.constexpr(1 << 29)
_CAUSAL = tl.constexpr(1 << 30)
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def unit_and_head(num_units, section, PARTS: tl.constexpr):
    """Return the unit, the part of its rows and the head that this program works on.

    Heads are processed in sections of `section`, so that concurrent keys and values fit the L2 cache; within a section
    the longest units start first, and heads that share keys and values start next to each other.
    """
    program = tl.program_id(0)
    per_section = num_units * PARTS * section
    rest = program % per_section
    head = program // per_section * section + rest % section
    part = rest // section % PARTS
    unit = rest // (section * PARTS)
    return unit, part, head


@triton.jit
def load_tile(
    source,
    row,
    head,
    stride_row,
    stride_head,
    num_rows,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TMA: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Load `ROWS` tokens of one head, `[ROWS, BLOCK_DIM]`; zeros beyond the tokens (if `CHECKED`) and the head's
    channels. `source` is a pointer, or with `TMA` a descriptor over `[tokens, heads * BLOCK_DIM]`."""
    if TMA:
        tile = source.load([row, head * BLOCK_DIM])
    else:
        rows = row + tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_DIM)
        token = rows.to(tl.int64)[:, None] * stride_row
        address = source + tl.cast(head, tl.int64) * stride_head + token + dims[None, :]
        exist = rows < num_rows
        if CHECKED and HEAD_DIM != BLOCK_DIM:
            tile = tl.load(address, mask=exist[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif CHECKED:
            tile = tl.load(address, mask=exist[:, None], other=0.0)
        elif HEAD_DIM != BLOCK_DIM:
            tile = tl.load(address, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(address)
    return tile


@triton.jit
def load_words(fields, positions, row, num_rows, ROWS: tl.constexpr):
    """Load low half, high half and position of `ROWS` tokens; padding beyond the tokens."""
    rows = row + tl.arange(0, ROWS)
    exist = rows < num_rows
    word = tl.load(fields + rows, mask=exist, other=0)
    position = tl.load(positions + rows, mask=exist, other=0)
    return word.to(tl.int32), (word >> 32).to(tl.int32), position


@triton.jit
def visible(
    query_low,
    query_high,
    query_position,
    key_low,
    key_high,
    key_position,
    window,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Apply the rule of `mask.visible` to queries and keys, a column and a row or the reverse. Terms of the query alone
    are computed once per query; a pair costs a few 32-bit operations."""
    causal = (query_high & _CAUSAL) != 0
    last = tl.where(causal, query_position, _FAR)
    attended = (query_low >> _ATTEND_SHIFT) & _MODALITIES
    compared = tl.where((query_high & _LOCAL) != 0, _SAMPLE | _INSTANCE, _SAMPLE)
    differing = query_high ^ key_high
    seen = ((attended & key_low) != 0) & (key_position <= last)
    if TOGETHER:
        own = tl.where((query_low & _TOGETHER) != 0, query_low & _MODALITIES, 0)
        seen = seen | (((own & key_low) != 0) & ((differing & _INSTANCE) == 0))
    seen = seen & ((differing & compared) == 0)
    if WINDOWED:
        held = (query_high & _WINDOW) != 0
        before = tl.where(held, query_position - window, -_FAR)
        beyond = tl.where(held & (causal == 0), query_position + window, _FAR)
        seen = seen & (key_position > before) & (key_position < beyond)
    return seen


@triton.jit
def bounded(dot, inner, SOFTCAP: tl.constexpr):
    """Return the products of queries and keys, or with a soft cap the hyperbolic tangent of `inner` times them. Times
    `outer` (see `triton_kernel.score_factors`) this is the score in base 2."""
    if SOFTCAP:
        dot = 2.0 * tl.sigmoid(2.0 * inner * dot) - 1.0
    return dot
