"""Attention of ragged rows in one call: flash attention over samples of unlike lengths, causal, windowed or full.

`varlen` is torch's own (flash attention 2), `flash3` the package flash_attn_interface (flash attention 3, Hopper).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.scores import Scores

Operator = Callable[..., torch.Tensor]
"""`(query, key, value, borders, longest, (before, after), scale)` to an output, with the numbers of `RaggedRow`."""


class _OnDevice(NamedTuple):
    borders: torch.Tensor
    padding: torch.Tensor | None


def attend(
    operator: Operator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """Return the output `[tokens, query_heads, head_dim]`; padding attends to itself, and its output is zeroed."""
    row, device = plan.mask_class.row, query.device
    assert row is not None, "the backend was chosen for a row that is not ragged"

    def copy(plan: AttentionPlan) -> _OnDevice:
        return _OnDevice(upload(row.borders, device), upload(row.padding, device) if row.padding.size else None)

    here: _OnDevice = plan.remember(("ragged", device), copy)
    output = operator(query, key, value, here.borders, row.longest, (row.before, row.after), scores.scale)
    return output if here.padding is None else output.index_fill(0, here.padding, 0)


def load_operator(name: str) -> Operator:
    """Return the operator of "varlen" or "flash3"."""
    if name == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        return partial(varlen, varlen_attn)
    import flash_attn_interface

    return partial(flash3, flash_attn_interface.flash_attn_varlen_func)


def varlen(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    seen: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """Call torch's `varlen_attn`."""
    # Without this parameter (torch 2.11) it takes fewer key heads as they are.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}
    output: torch.Tensor = function(
        query, key, value, borders, borders, longest, longest, scale=scale, window_size=seen, **grouped
    )
    return output


def flash3(
    function: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    seen: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """Call flash_attn_interface's `flash_attn_varlen_func`."""
    # It reads `causal` as (-1, 0), and knows windows besides.
    output = function(
        query, key, value, borders, borders, longest, longest, softmax_scale=scale, causal=seen == (-1, 0),
        window_size=(-1, -1) if seen == (-1, 0) else seen, deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first
