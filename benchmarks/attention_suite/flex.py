"""FlexAttention's masks, made from our tables instead of tokens x tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.masks.blocks import BlockKind, BlockTable
from dilatant.attention.masks.visibility import visible_pairs

BLOCK = 128


def block_mask(plan: AttentionPlan, device: torch.device) -> BlockMask:
    """FlexAttention's mask for a plan, kept with it; dense blocks x blocks tables of int32."""
    return plan.remember(("flex block mask", device), lambda plan: _block_mask(plan, device))


def mask_mod(plan: AttentionPlan, device: torch.device) -> Callable[..., torch.Tensor]:
    """The rule of `mask.visible` as FlexAttention asks for it: `(batch, head, query, key) -> bool`."""
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
        counts.to(device),
        columns.to(device),
        full_counts.to(device),
        full_columns.to(device),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(plan, device),
        seq_lengths=(table.row_tokens, table.column_tokens),
    )


def _dense_lists(table: BlockTable, kind: BlockKind) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of column blocks of one kind per row, int32 `[1, 1, rows]`, and the blocks, int32 `[1, 1, rows, columns]`,
    zero beyond the number."""
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
    return torch.tensor(counts, dtype=torch.int32)[None, None], torch.tensor(dense)[None, None]
