"""Attention with a dense boolean mask, query by query and head by head, straight from its definition."""

from __future__ import annotations

import torch


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[queries, query_heads, value_dim]` and natural logsumexp `[queries, query_heads]`.

    `seen` is bool `[queries, keys]`; a query that sees nothing gives 0 and -inf, sinks or not.
    """
    queries, query_heads, _ = query.shape
    per_kv_head = query_heads // key.shape[1]
    rows, sums = [], []
    for q in range(queries):
        for head in range(query_heads):
            which = seen[q].nonzero()[:, 0]
            if which.numel() == 0:
                rows.append((query[q, head] * 0).sum() * value.new_ones(value.shape[2]))
                sums.append(torch.tensor(-torch.inf, dtype=query.dtype))
                continue
            kv_head = head // per_kv_head
            score = key[which, kv_head] @ query[q, head] * scale
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if sinks is not None:
                score = torch.cat([score, sinks[head : head + 1]])
            weight = torch.softmax(score, 0)[: which.numel()]
            rows.append(weight @ value[which, kv_head])
            sums.append(torch.logsumexp(score, 0))
    return torch.stack(rows).view(queries, query_heads, -1), torch.stack(sums).view(queries, query_heads)


def dense_gradients(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and logsumexp as above, and the gradients of query, key, value and (if given) sinks."""
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    extra = [] if sinks is None else [sinks.detach().clone().requires_grad_()]
    output, logsumexp = dense_attention(*inputs, seen, scale, softcap, *extra)
    grads = torch.autograd.grad(output, [*inputs, *extra], grad_output, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, [*inputs, *extra], strict=True)]
    return [output.detach(), logsumexp.detach()], zeros
