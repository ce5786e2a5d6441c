"""Random attention calls over packed rows, and their dense answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dilatant.attention.masks.mask import AttentionMask
from oracles.dense_attention import dense_gradients
from oracles.dense_mask import word_matrix


@dataclass(frozen=True)
class Case:
    """Tensors of one call; `seen` is what the oracle says, bool `[queries, keys]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    grad_output: torch.Tensor
    mask: AttentionMask
    keys: AttentionMask | None
    scale: float
    softcap: float | None
    seen: torch.Tensor

    def dense(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Output and logsumexp, and gradients, in float64."""
        tensors = (x.double() for x in (self.grad_output, self.query, self.key, self.value))
        sinks = None if self.sinks is None else self.sinks.double()
        return dense_gradients(*tensors, self.seen, self.scale, self.softcap, sinks)


def seen_by_oracle(mask: AttentionMask, keys: AttentionMask | None = None) -> torch.Tensor:
    keys = mask if keys is None else keys
    return torch.tensor(word_matrix(mask.fields, keys.fields, mask.positions, keys.positions, mask.window))


def make_case(
    mask: AttentionMask,
    keys: AttentionMask | None = None,
    *,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    key_tokens = (mask if keys is None else keys).num_tokens
    return Case(
        query=draw(mask.num_tokens, query_heads, head_dim),
        key=draw(key_tokens, kv_heads, head_dim),
        value=draw(key_tokens, kv_heads, head_dim),
        sinks=draw(query_heads) if sinks else None,
        grad_output=draw(mask.num_tokens, query_heads, head_dim),
        mask=mask,
        keys=keys,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        seen=seen_by_oracle(mask, keys),
    )


def assert_close_to_dense(
    results: tuple[torch.Tensor, torch.Tensor], gradients: list[torch.Tensor], case: Case, tolerance: float
) -> None:
    """`results` are output `[queries, heads, dim]` and logsumexp `[queries, heads]`.

    `tolerance` bounds every difference, against values of order one.
    """
    (output, logsumexp), dense_grads = case.dense()
    names = ("output", "logsumexp", "query gradient", "key gradient", "value gradient", "sinks gradient")
    found = [*results, *gradients]
    assert len(found) == 2 + len(dense_grads)
    for name, got, wanted in zip(names, found, [output, logsumexp, *dense_grads]):
        torch.testing.assert_close(
            got.double(), wanted, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
