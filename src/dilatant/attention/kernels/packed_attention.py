"""Attention over one packed row, differentiable on every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.backends import KERNELS, choose_backend, installed, request_of
from dilatant.attention.kernels.scores import Kernel, Scores
from dilatant.attention.masks.mask import AttentionMask


@torch.compiler.disable
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask | AttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute attention of one packed row: `[tokens, query_heads, value_dim]` in the query's dtype.

    `query` is `[tokens, query_heads, head_dim]`, `key` `[key_tokens, kv_heads, head_dim]` and `value`
    `[key_tokens, kv_heads, value_dim]`; every `query_heads / kv_heads` consecutive query heads share a KV head. `mask`
    says which tokens attend to which; pass an `AttentionPlan` if several calls share a mask, so that its tables are
    computed once. A query that sees nothing (padding) yields zeros and zero gradients; values at padding must be
    finite. `scale` defaults to `head_dim ** -0.5`. `softcap` bounds scores by `softcap * tanh(score / softcap)` (Gemma
    2). `sinks` `[query_heads]` are logits in each head's softmax without a value (gpt-oss). `backend` is "auto" or a
    name in `dilatant.attention.kernels.backends`. Raises AttentionError, with the reason, if the tensors do not fit
    together or the backend does not support the request.
    """
    plan = mask if isinstance(mask, AttentionPlan) else AttentionPlan(mask)
    alike = tuple((part.shape, part.dtype, part.device, part.requires_grad) for part in (query, key, value))
    call = "backend", backend, alike, torch.is_grad_enabled(), softcap is None, None if sinks is None else sinks.shape

    def choose(plan: AttentionPlan) -> str:
        request = request_of(query, key, value, plan, softcap=softcap, sinks=sinks)
        return choose_backend(request, installed(query.device), backend).name

    name = plan.remember(call, choose)  # once for all layers of a microbatch
    scores = Scores(query.shape[2] ** -0.5 if scale is None else scale, softcap)
    return _load(name)(query, key, value, sinks, plan, scores)


def _load(name: str) -> Callable[..., torch.Tensor]:
    """Return a backend as a function of query, key, value, sinks, plan and scores."""
    if name in KERNELS:
        kernel = load_kernel(name)
        return lambda *inputs: KernelFunction.apply(*inputs, kernel)[0]
    if name in ("varlen", "flash3"):
        from dilatant.attention.kernels import ragged

        return partial(ragged.attend, ragged.load_operator(name))
    if name == "magi":
        from magi_attention.functional.flex_flash_attn import flex_flash_attn_func

        from dilatant.attention.kernels import key_intervals

        return partial(key_intervals.magi, flex_flash_attn_func)
    if name == "cudnn_flex":
        import cudnn.flex_attention

        from dilatant.attention.kernels import key_intervals

        return partial(key_intervals.cudnn_flex, cudnn.flex_attention)
    if name == "flex":
        from dilatant.attention.kernels import flex

        return flex.attend
    from dilatant.attention.kernels import sdpa

    return sdpa.attend


def load_kernel(name: str) -> Kernel:
    """Return forward and backward of "triton" or "blockwise"."""
    if name == "triton":
        from dilatant.attention.kernels import triton_kernel

        return triton_kernel.kernel()
    from dilatant.attention.kernels import blockwise

    return Kernel(blockwise.forward, blockwise.backward)


class KernelFunction(torch.autograd.Function):
    """Autograd function of a kernel's forward and backward."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, plan: AttentionPlan, scores: Scores, kernel: Kernel):
        output, logsumexp = kernel.forward(query, key, value, sinks, plan, scores)
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp)
        ctx.plan, ctx.scores, ctx.kernel = plan, scores, kernel
        ctx.mark_non_differentiable(logsumexp)
        return output, logsumexp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, _):
        query, key, value, sinks, output, logsumexp = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad_output, query, key, value, sinks, output, logsumexp, ctx.plan, ctx.scores)
        return *gradients, None, None, None
