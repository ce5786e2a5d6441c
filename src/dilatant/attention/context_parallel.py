"""Context-parallel attention: each rank computes its own queries against the keys and values of the whole row.

Keys and values are all-gathered one group of heads at a time; the next group is gathered while the current one is
computed (Cornstarch, the thesis, 3.4.3), so a rank holds at most two groups of heads of the whole row. Any placement of
blocks works, since mask words and positions are stored per token. The backward pass repeats the all-gather, and
reduce-scatters the gradients of keys and values to their ranks, summed in float32.

A collective starts after the work queued on the calling stream, and `wait` blocks that stream, not the host. Therefore
alternating between two buffers is safe without further events, on GPUs too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dilatant.attention.kernels.attention_plan import AttentionPlan, upload
from dilatant.attention.kernels.backends import choose_kernel, installed, request_of
from dilatant.attention.kernels.packed_attention import load_kernel
from dilatant.attention.kernels.scores import AttentionError, Kernel, Scores
from dilatant.attention.masks.mask import PADDING, AttentionMask
from dilatant.attention.masks.placement import Placement, PlacementError

MOST_GATHERS = 4
"""The most all-gathers of keys and values per call: with four, three quarters of the communication can be hidden."""


class PendingRows(Protocol):
    def wait(self) -> object:
        """Return when the tensors may be used; on a GPU the current stream waits."""


class ContextRanks(Protocol):
    """Context-parallel group of a row (interface of `comm.group.Group`); all calls return immediately."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def index(self) -> int:
        """This rank's index in the group."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str = "") -> PendingRows: ...

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, what: str = "") -> PendingRows: ...

    def send(self, tensor: torch.Tensor, to: int, *, what: str) -> PendingRows: ...

    def receive(self, tensor: torch.Tensor, source: int, *, what: str) -> PendingRows: ...


class ContextParallelRow:
    """One rank's shard of a packed row, for every layer of a microbatch.

    `mask` is the whole row's mask; `placement` says which rank of `group` holds which blocks of `block` tokens.
    `tokens` are the rank's tokens, int64 row indices in row order, by which its activations, positions and labels are
    selected; `of_rank` lists the tokens of all ranks. A rank without tokens computes one token of padding, so that it
    joins the collectives (see `take`). `mask_in_windows` is a separate mask for layers with a window. Raises
    PlacementError if the placement is for another number of ranks or blocks.
    """

    def __init__(
        self,
        mask: AttentionMask,
        placement: Placement,
        group: ContextRanks,
        *,
        block: int = 128,
        mask_in_windows: AttentionMask | None = None,
    ) -> None:
        size = len(group.ranks)
        if placement.num_ranks != size:
            raise PlacementError(f"blocks were placed on {placement.num_ranks} ranks, the group has {size}")
        of_rank = self.of_rank = [placement.tokens_of_rank(rank, mask.num_tokens, block) for rank in range(size)]
        self.mask = mask
        self.group = group
        self.tokens = of_rank[group.index]
        self.width = int(placement.counts.max(initial=0)) * block
        """Number of tokens that each rank sends, with padding to the largest number of blocks of any rank."""

        in_windows = None if mask_in_windows is None else self._plan(mask_in_windows)
        self.plan = self._plan(mask, in_windows)

    def _plan(self, mask: AttentionMask, in_windows: AttentionPlan | None = None) -> AttentionPlan:
        """Return the attention plan of this rank's queries against all ranks' keys."""
        size = len(self.of_rank)
        fields = np.full((size, self.width), PADDING, dtype=np.int64)
        positions = np.zeros((size, self.width), dtype=np.int64)
        for rank, tokens in enumerate(self.of_rank):
            fields[rank, : tokens.size] = mask.fields[tokens]
            positions[rank, : tokens.size] = mask.positions[tokens]
        keys = AttentionMask.from_tokens(fields.ravel(), positions.ravel())
        own = mask.take(self.tokens) if self.tokens.size else AttentionMask.from_tokens([PADDING])
        return AttentionPlan(own, keys, in_windows)

    def windowed(self, window: int | None) -> ContextParallelRow:
        """Return the shard under another window width; its tables are cached with this one."""
        if window == self.plan.mask.window:
            return self
        share = copy.copy(self)
        share.plan = self.plan.windowed(window)
        return share

    def take(self, row: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Select this rank's tokens from a tensor over the whole row, `[tokens, ...]`; a rank without tokens gets one
        entry filled with `padding`."""
        if not self.tokens.size:
            return row.new_full((1, *row.shape[1:]), padding)
        return row[upload(self.tokens, row.device)]

    def places(self, at: torch.Tensor) -> torch.Tensor:
        """Select the row indices in `at` whose tokens this rank holds, as ascending indices into its `tokens`."""
        is_place = np.zeros(sum(tokens.size for tokens in self.of_rank), dtype=bool)
        is_place[at] = True
        return torch.from_numpy(np.flatnonzero(is_place[self.tokens]))

    @torch.no_grad()
    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum `part` over all ranks (in rank order, after an all-gather)."""
        parts = part.new_empty(len(self.of_rank), *part.shape)
        self.group.all_gather(parts, part.contiguous(), "sums of context-parallel ranks").wait()
        return parts.sum(0)

    @torch.no_grad()
    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All-gather the whole row, `[tokens, ...]`, from every rank's `own` tokens, `[own tokens, ...]`."""
        padded = own.new_zeros(self.width, *own.shape[1:])
        padded[: self.tokens.size] = own[: self.tokens.size]
        parts = own.new_empty(len(self.of_rank), *padded.shape)
        self.group.all_gather(parts, padded, "tokens of context-parallel ranks").wait()
        row = own.new_empty(sum(tokens.size for tokens in self.of_rank), *own.shape[1:])
        for tokens, part in zip(self.of_rank, parts):
            row[upload(tokens, row.device)] = part[: tokens.size]
        return row


def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    share: ContextParallelRow,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    heads_per_gather: int | None = None,
) -> torch.Tensor:
    """Compute attention of this rank's queries over all keys of the row: `[own tokens, query_heads, head_dim]`.

    `query`, `key` and `value` hold the rank's own tokens, `[own tokens, heads, head_dim]`, in the order of
    `share.tokens`; it is a collective call of the group. Results and gradients equal those of `attention` in one
    process. The gradient of `sinks` is this rank's summand of the full gradient. `heads_per_gather` KV heads are
    gathered at once, by default a quarter of them. Raises AttentionError if the tensors do not fit together or
    `backend` does not support the request.
    """
    if key.shape != value.shape:
        raise AttentionError(
            f"context-parallel keys are {list(key.shape)}, values {list(value.shape)}; they must agree"
        )
    request = request_of(
        query, key, value, share.plan, softcap=softcap, sinks=sinks, key_tokens=share.plan.mask.num_tokens
    )
    kernel = load_kernel(choose_kernel(request, installed(query.device), backend))
    kv_heads = key.shape[1]
    heads = -(-kv_heads // MOST_GATHERS) if heads_per_gather is None else heads_per_gather
    if heads < 1:
        raise AttentionError(f"heads_per_gather must be at least 1, got {heads}")
    scores = Scores(query.shape[2] ** -0.5 if scale is None else scale, softcap)
    return _ContextParallel.apply(query, key, value, sinks, share, scores, kernel, heads)


class _Heads(NamedTuple):
    """A group of heads that is all-gathered in one collective."""

    kv: slice
    query: slice


class _Gathered(NamedTuple):
    heads: _Heads
    key: torch.Tensor
    value: torch.Tensor


def _gather(
    key: torch.Tensor, value: torch.Tensor, groups: list[_Heads], share: ContextParallelRow
) -> Iterator[_Gathered]:
    """Yield keys and values of the whole row, `[ranks * width, heads, dim]`, for one group of heads after the other.
    The next group is gathered while the caller computes with the yielded one, which is overwritten two steps later."""
    ranks = len(share.group.ranks)
    buffers: list[torch.Tensor] = []

    def start(number: int) -> tuple[torch.Tensor, PendingRows]:
        heads = groups[number].kv
        shape = (2 * (heads.stop - heads.start), key.shape[2])
        own = key.new_zeros((share.width, *shape))
        own[: key.shape[0], : shape[0] // 2] = key[:, heads]
        own[: key.shape[0], shape[0] // 2 :] = value[:, heads]
        if number < 2:
            buffers.append(key.new_empty((ranks * share.width, *shape)))
        everybody = buffers[number % 2][:, : shape[0]]
        if not everybody.is_contiguous():
            everybody = key.new_empty((ranks * share.width, *shape))
        return everybody, share.group.all_gather(everybody, own, "keys and values of context-parallel ranks")

    following = start(0)
    for number, heads in enumerate(groups):
        everybody, work = following
        if number + 1 < len(groups):
            following = start(number + 1)
        work.wait()
        key_part, value_part = everybody.chunk(2, dim=1)
        yield _Gathered(heads, key_part, value_part)


class _ContextParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, share: ContextParallelRow, scores: Scores, kernel: Kernel, heads: int):
        each, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
        ends = [(first, min(first + heads, kv_heads)) for first in range(0, kv_heads, heads)]
        groups = [_Heads(slice(first, end), slice(first * each, end * each)) for first, end in ends]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        logsumexp = []
        for gathered in _gather(key, value, groups, share):
            part = gathered.heads.query
            sink = None if sinks is None else sinks[part]
            output[:, part], sums = kernel.forward(
                query[:, part], gathered.key, gathered.value, sink, share.plan, scores
            )
            logsumexp.append(sums)
        ctx.save_for_backward(query, key, value, sinks, output, *logsumexp)
        ctx.share, ctx.scores, ctx.kernel, ctx.groups = share, scores, kernel, groups
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        query, key, value, sinks, output, *logsumexp = ctx.saved_tensors
        share: ContextParallelRow = ctx.share
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        grad_sinks = None if sinks is None else torch.empty_like(sinks)
        sent: _Reduction | None = None
        for gathered, sums in zip(_gather(key, value, ctx.groups, share), logsumexp, strict=True):
            part = gathered.heads.query
            gradients = ctx.kernel.backward(
                grad_output[:, part],
                query[:, part],
                gathered.key,
                gathered.value,
                None if sinks is None else sinks[part],
                output[:, part],
                sums,
                share.plan,
                ctx.scores,
            )
            grad_query[:, part] = gradients.query
            if grad_sinks is not None:
                grad_sinks[part] = gradients.sinks
            reduction = _reduce(gathered.heads, gradients.key, gradients.value, share)
            if sent is not None:
                sent.finish(grad_key, grad_value)
            sent = reduction
        if sent is not None:
            sent.finish(grad_key, grad_value)
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None, None


class _Reduction(NamedTuple):
    """A reduce-scatter in progress, for the gradients of one group of heads; `parts` keeps its input alive."""

    heads: _Heads
    work: PendingRows
    parts: torch.Tensor
    own: torch.Tensor

    def finish(self, grad_key: torch.Tensor, grad_value: torch.Tensor) -> None:
        self.work.wait()
        key_part, value_part = self.own[: grad_key.shape[0]].chunk(2, dim=1)
        grad_key[:, self.heads.kv] = key_part
        grad_value[:, self.heads.kv] = value_part


def _reduce(heads: _Heads, grad_key: torch.Tensor, grad_value: torch.Tensor, share: ContextParallelRow) -> _Reduction:
    dtype = torch.promote_types(grad_key.dtype, torch.float32)
    parts = torch.cat([grad_key.to(dtype), grad_value.to(dtype)], dim=1)
    own = parts.new_empty((share.width, *parts.shape[1:]))
    work = share.group.reduce_scatter(own, parts, "gradients of keys and values of context-parallel ranks")
    return _Reduction(heads, work, parts, own)
