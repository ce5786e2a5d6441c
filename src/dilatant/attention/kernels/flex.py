"""FlexAttention on our block tables: any mask, with no table of tokens x tokens. Compiled on GPUs; on a CPU it has no
backward and holds all scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.blockwise import visible_pairs
from dilatant.attention.kernels.scores import Scores
from dilatant.attention.masks.blocks import BlockKind, BlockTable

BLOCK = 128


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """Return the output `[tokens, query_heads, value_dim]`, zero where a query sees nothing."""
    run: Any = _compiled() if query.device.type == "cuda" else flex_attention
    q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
    output: torch.Tensor = run(
        q, k, v, score_mod=None if scores.softcap is None else _cap(scores.softcap),
        block_mask=block_mask(plan, query.device), scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return output[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    # A whole graph or an error: what torch would run instead holds all scores.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def block_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    """Return FlexAttention's mask for a plan, kept with it: blocks x blocks tables of int32, and no tokens x tokens."""
    found: BlockMask = plan.remember(("flex block mask", device), lambda plan: _block_mask(plan, device))
    return found


def mask_mod(plan: AttentionPlan, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the rule of `mask.visible` as FlexAttention asks for it: `(batch, head, query, key) -> bool`."""
    query_fields, query_positions, key_fields, key_positions = plan.tensors(device)
    window = plan.mask.window

    def rule(batch: torch.Tensor, head: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return visible_pairs(query_fields[q], key_fields[k], query_positions[q], key_positions[k], window)

    return rule


def _block_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    table = plan.table(BLOCK, BLOCK)
    counts, columns = _dense_lists(table, BlockKind.PARTIAL)
    full_counts, full_columns = _dense_lists(table, BlockKind.FULL)
    return BlockMask.from_kv_blocks(
        upload(counts, device),
        upload(columns, device),
        upload(full_counts, device),
        upload(full_columns, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(plan, device),
        seq_lengths=(table.row_tokens, table.column_tokens),
    )


def _dense_lists(table: BlockTable, kind: BlockKind) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the number of column blocks of one kind per row, int32 `[1, 1, rows]`, and the blocks, int32
    `[1, 1, rows, columns]`, zero beyond the number."""
    kept = table.kind == kind
    start, length = table.start[kept], table.length[kept]
    rows = np.repeat(np.arange(table.num_rows), np.diff(table.offsets))[kept]
    counts = np.bincount(rows, weights=length, minlength=table.num_rows).astype(np.int64)
    before = np.cumsum(length) - length
    blocks = np.repeat(start - before, length) + np.arange(int(length.sum()))
    row_of = np.repeat(rows, length)
    place = np.arange(row_of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    dense = np.zeros((table.num_rows, table.num_columns), dtype=np.int32)
    dense[row_of, place] = blocks
    return counts.astype(np.int32)[None, None], dense[None, None]
