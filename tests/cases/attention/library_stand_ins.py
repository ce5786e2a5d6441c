"""Functions that do on a CPU what MagiAttention's and cuDNN's pages say of theirs, on dense masks; they refuse what the
libraries refuse. `calls` keeps the arguments of each call."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oracles.key_intervals import end_matrix, slice_matrix

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float = 0.0, sink: Tensor | None = None
) -> Tensor:
    """Return attention of `[tokens, heads, channels]` in float32 sums, zero where a query sees nothing."""
    group = q.shape[1] // k.shape[1]
    query, key, value = (part.transpose(0, 1).float() for part in (q, k, v))
    key, value = (part.repeat_interleave(group, 0) for part in (key, value))
    score = query @ key.transpose(1, 2) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~seen, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink.t()[:, None].expand(-1, score.shape[1], -1)], dim=-1)
    top = score.amax(-1, keepdim=True).detach().clamp(min=-1e30)
    weight = (score - top).exp()
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)
    return (weight[..., : key.shape[1]] @ value).transpose(0, 1).to(q.dtype)


class Magi:
    """`flex_flash_attn_func`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        self.calls.append(("flex_flash_attn_func", args, options))
        return self.attend(*args, **options), None

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, q_ranges: Tensor, k_ranges: Tensor, attn_type_map: Tensor, *,
        sink: Tensor | None, softmax_scale: float, softcap: float, deterministic: bool,
        disable_fwd_atomic_reduction: bool,
    ) -> Tensor:  # fmt: skip
        assert q.shape[2] == k.shape[2] == v.shape[2] in (64, 128)
        assert all(part.stride(-1) == 1 for part in (q, k, v))
        for table in (q_ranges, k_ranges, attn_type_map):
            assert (table.dtype, table.is_contiguous(), len(table)) == (torch.int32, True, len(q_ranges))
        assert len(q_ranges)
        assert sink is None or (sink.dtype, sink.shape[1:]) == (torch.float32, (q.shape[1],))
        assert not deterministic
        if disable_fwd_atomic_reduction:
            ends = sorted(q_ranges.tolist())
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        times = slice_matrix(q_ranges.tolist(), k_ranges.tolist(), attn_type_map.tolist(), (len(q), len(k)))
        assert times.max() <= 1
        return dense(q, k, v, torch.from_numpy(times > 0), softmax_scale, softcap, sink)


class MaskPlan(NamedTuple):
    seen: Tensor
    shapes: list[Any]
    dtype: torch.dtype
    has_backward: bool


class CudnnFlex:
    """The module cudnn.flex_attention."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def create_mask_plan(self, *args: Any, **options: Any) -> MaskPlan:
        self.calls.append(("create_mask_plan", args, options))
        return self.plan(*args, **options)

    def flex_attn_func(self, *args: Any, **options: Any) -> Tensor:
        self.calls.append(("flex_attn_func", args, options))
        return self.attend(*args, **options)

    @staticmethod
    def plan(mask_func: Tensor, q: Tensor, k: Tensor, v: Tensor, *, build_backward: bool) -> MaskPlan:
        assert (mask_func.dtype, mask_func.ndim, mask_func.is_contiguous()) == (torch.int32, 3, True)
        assert (mask_func.shape[0], mask_func.shape[2]) == (1, q.shape[1])
        assert all(part.ndim == 4 and part.shape[3] % 8 == 0 for part in (q, k, v))
        seen = torch.from_numpy(end_matrix(mask_func[0].tolist(), k.shape[1]))
        return MaskPlan(seen, [part.shape for part in (q, k, v)], q.dtype, build_backward)

    @staticmethod
    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, mask_plan: MaskPlan, softmax_scale: float, deterministic: bool
    ) -> Tensor:
        assert mask_plan.shapes == [part.shape for part in (q, k, v)]
        assert mask_plan.dtype == q.dtype
        needs_backward = torch.is_grad_enabled() and any(part.requires_grad for part in (q, k, v))
        assert mask_plan.has_backward or not needs_backward
        assert not deterministic
        return dense(q[0], k[0], v[0], mask_plan.seen, softmax_scale)[None]
