"""Grouped linear layer: each group of rows is multiplied by the group's matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_ALIGNED_BYTES = 16
"""Alignment that torch's kernel needs for rows and weights."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows [rows, in], sorted by group, by the transposed matrix of their group in `weight` [groups, out, in]:
    [rows, out]. counts: rows of each group, possibly 0."""
    if _has_kernel(rows, weight):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return functional.grouped_mm(
            rows.contiguous(), weight.transpose(-2, -1), offs=ends.to(rows.device, non_blocking=True)
        )
    parts = [functional.linear(part, one) for part, one in zip(rows.split(list(counts)), weight, strict=True)]
    return torch.cat(parts)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return True if torch multiplies all groups in one kernel: in bf16 on GPUs since compute capability 8.0."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    return (
        hasattr(functional, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and all(size * rows.element_size() % _ALIGNED_BYTES == 0 for size in weight.shape[-2:])
        and weight.data_ptr() % _ALIGNED_BYTES == 0
        and len(rows) > 0
    )
