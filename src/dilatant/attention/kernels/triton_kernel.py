"""Launches of the Triton attention kernels: from tensors and a plan to results, without waiting for the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from dilatant.attention.kernels.attention_plan import AttentionPlan, DeviceWork
from dilatant.attention.kernels.blockwise import sink_gradient
from dilatant.attention.kernels.scores import Gradients, Kernel, Scores
from dilatant.attention.kernels.triton_backward import (
    add_parts_kernel,
    delta_kernel,
    grad_key_value_kernel,
    grad_query_kernel,
)
from dilatant.attention.kernels.triton_forward import forward_kernel, join_forward_kernel
from dilatant.attention.kernels.triton_tuning import PRECISION, Tile, Tuning, padded_head_dim, tuning_for

JOIN_TOKENS = 16
_capability = functools.cache(torch.cuda.get_device_capability)  # needed by every launch, asked once
_properties = functools.cache(torch.cuda.get_device_properties)


class _Launch(NamedTuple):
    """Settings of one kernel's launch."""

    plan: AttentionPlan
    scores: Scores
    tuning: Tuning
    tile: Tile
    work: DeviceWork
    head_dim: int


def kernel(tuning: Tuning | None = None) -> Kernel:
    """Return the Triton kernels as a forward and a backward; `tuning` None selects the tuning for the tensors."""
    return Kernel(functools.partial(forward, tuning=tuning), functools.partial(backward, tuning=tuning))


def score_factors(scores: Scores) -> tuple[float, float]:
    """Return `inner` and `outer`: the score in base 2 is `outer * q.k`, or `outer * tanh(inner * q.k)` if capped."""
    if scores.softcap is None:
        return 0.0, scores.scale * math.log2(math.e)
    return scores.scale / scores.softcap, scores.softcap * math.log2(math.e)


def _on_their_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Run `launch` with the tensors' GPU as the current device, where Triton launches."""

    @functools.wraps(launch)
    def run(tensor: torch.Tensor, *rest: Any, **options: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return launch(tensor, *rest, **options)

    return run


@_on_their_device
def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    scores: Scores,
    tuning: Tuning | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[tokens, query_heads, head_dim]` and natural logsumexp `[query_heads, tokens]`, float32."""
    tuning = tuning or _tuning(query)
    tile = tuning.forward
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    output = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    logsumexp = torch.empty((heads, tokens), dtype=torch.float32, device=query.device)
    if not tokens or not key.shape[0]:
        return output.zero_(), logsumexp.fill_(-math.inf)
    query, key, value = (_loadable(x, tuning) for x in (query, key, value))
    work = _work(plan, query, tuning, heads)
    shape = (work.num_slots, heads, tuning.block)
    partial_output = _partial((*shape, head_dim), query)
    partial_logsumexp = _partial(shape, query)
    _launch(
        forward_kernel,
        (query, key, value),
        (output, logsumexp, partial_output, partial_logsumexp, sinks),
        score_factors(scores),
        _Launch(plan, scores, tuning, tile, work, head_dim),
        (tile.queries, heads, _section(key) * (heads // kv_heads)),
        QUERY_HEADS=heads,
        GROUP=heads // kv_heads,
        SINKS=sinks is not None,
    )
    _launch_joins(
        join_forward_kernel,
        work,
        (heads, tuning.block // JOIN_TOKENS),
        (output, logsumexp, partial_output, partial_logsumexp, sinks, work.splits, tokens),
        QUERY_HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=padded_head_dim(head_dim),
        ROW_BLOCK=tuning.block,
        BLOCK_M=JOIN_TOKENS,
        SINKS=sinks is not None,
    )
    return output, logsumexp


@_on_their_device
def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    plan: AttentionPlan,
    scores: Scores,
    tuning: Tuning | None = None,
) -> Gradients:
    """Return gradients in the dtypes of the inputs; equal inputs give bitwise equal gradients."""
    tuning = tuning or _tuning(query)
    tokens, heads, head_dim = query.shape
    grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grad_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    if not tokens or not key.shape[0]:
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        return Gradients(grad_query.zero_(), grad_key.zero_(), grad_value.zero_(), grad_sinks)
    output, grad_output = (x if x.stride(2) == 1 else x.contiguous() for x in (output, grad_output))
    delta = torch.empty_like(logsumexp)
    delta_kernel[(triton.cdiv(tokens, JOIN_TOKENS), heads)](
        output,
        grad_output,
        delta,
        tokens,
        *output.stride()[:2],
        *grad_output.stride()[:2],
        HEAD_DIM=head_dim,
        BLOCK_DIM=padded_head_dim(head_dim),
        BLOCK_M=JOIN_TOKENS,
    )
    sources = query, key, value, grad_output = [_loadable(x, tuning) for x in (query, key, value, grad_output)]
    kv_heads = key.shape[1]
    group = heads // kv_heads

    def gradients(
        kernel: Any,
        tile: Tile,
        rows: int,
        grads: Sequence[torch.Tensor],
        section: int,
        constants: dict[str, int],
        **work: Any,
    ) -> None:
        """Run the kernel that writes `grads`, `rows` of their tokens per program. `work`: options of `work_list`."""
        copies = grads[0].shape[1]
        units = _work(plan, query, tuning, copies, **work)
        partial = [_partial((units.num_slots, copies, tuning.block, head_dim), query) for _ in grads]
        _launch(
            kernel,
            sources,
            (logsumexp, delta, *grads, *partial),
            (scores.scale, *score_factors(scores)),
            _Launch(plan, scores, tuning, tile, units, head_dim),
            (rows, copies, section),
            GROUP=group,
            **constants,
        )
        for grad, part in zip(grads, partial, strict=True):
            _add_parts(grad, part, units, tuning)

    tile = tuning.grad_query
    heads_of = {"QUERY_HEADS": heads}
    gradients(grad_query_kernel, tile, tile.queries, [grad_query], _section(key) * group, heads_of)
    tile, section, heads_of = tuning.grad_key_value, _section(query, group), {"KV_HEADS": kv_heads}
    grads = [grad_key, grad_value]
    gradients(grad_key_value_kernel, tile, tile.keys, grads, section, heads_of, transposed=True, copy_cost=group)
    grad_sinks = None if sinks is None else sink_gradient(sinks, logsumexp, delta)
    return Gradients(grad_query, grad_key, grad_value, grad_sinks)


def _add_parts(grad: torch.Tensor, partial: torch.Tensor, work: DeviceWork, tuning: Tuning) -> None:
    _, heads, head_dim = grad.shape
    _launch_joins(
        add_parts_kernel,
        work,
        (heads, tuning.block // JOIN_TOKENS),
        (grad, partial, work.splits, grad.shape[0]),
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=padded_head_dim(head_dim),
        ROW_BLOCK=tuning.block,
        BLOCK=JOIN_TOKENS,
    )


def _tuning(query: torch.Tensor) -> Tuning:
    capability = _capability(query.device) if query.is_cuda else (8, 0)
    return tuning_for(query.shape[2], query.element_size(), capability)


def _launch(
    kernel: Any,
    sources: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor | None],
    factors: Sequence[float],
    launch: _Launch,
    grid: tuple[int, int, int],
    **constants: Any,
) -> None:
    """Launch an attention kernel: the arguments that all kernels share, in their common order.

    `sources`: queries, keys, values and, in a backward, gradients of the output. `grid`: rows of a program, heads, and
    heads of a section (see `unit_and_head`).
    """
    plan, scores, tuning, tile, work, head_dim = launch
    rows, heads, section = grid
    tiles = tile.queries, tile.keys, tile.keys, tile.queries
    num_units = work.units.shape[0]
    arguments = (
        *(_source(source, size, tuning) for source, size in zip(sources, tiles)),
        *others,
        work.units,
        work.intervals,
        *plan.tensors(sources[0].device),
        num_units,
        section,
        sources[0].shape[0],
        sources[1].shape[0],
        plan.mask.window or 0,
        *factors,
        *(stride for source in sources for stride in source.stride()[:2]),
    )
    constants |= {
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": padded_head_dim(head_dim),
        "ROW_BLOCK": tuning.block,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
        "WINDOWED": plan.mask.window is not None,
        "SOFTCAP": scores.softcap is not None,
        "TMA": tuning.tma,
        "PRECISION": PRECISION,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    kernel[(num_units * (tuning.block // rows) * heads,)](*arguments, TOGETHER=plan.has_together, **constants)
    _compile_ahead(kernel, sources[0], arguments, TOGETHER=not plan.has_together, **constants)


def _launch_joins(
    kernel: Any, work: DeviceWork, grid: tuple[int, int], arguments: Sequence[Any], **constants: Any
) -> None:
    """Launch a kernel that joins the parts of split rows, if there are any. `grid`: heads, and parts of a block."""
    if work.num_slots:
        kernel[(work.splits.shape[0], *grid)](*arguments, **constants)
    else:
        _compile_ahead(kernel, arguments[0], arguments, **constants)


def _compile_ahead(kernel: Any, like: torch.Tensor, arguments: Sequence[Any], **constants: Any) -> None:
    """Compile a variant of a kernel that this row does not need and another row of the run may. The first step, which
    has a long deadline, then compiles all variants, and no later one waits for the compiler. like: gives the dtype."""
    variant = kernel, like.dtype, *constants.values()
    if variant not in (known := _compiled(like.device)):
        known.add(variant)
        kernel.warmup(*arguments, grid=(1,), **constants)


@functools.cache
def _compiled(device: torch.device) -> set[Any]:
    """Return the variants that were compiled ahead for a device, to which `_compile_ahead` adds."""
    return set()


def _work(plan: AttentionPlan, query: torch.Tensor, tuning: Tuning, copies: int, **options: Any) -> DeviceWork:
    return plan.work(
        query.device,
        tuning.block,
        copies,
        tuning.processors or _processors(query.device),
        smallest_piece_tokens=tuning.smallest_piece_tokens,
        **options,
    )


def _processors(device: torch.device) -> int:
    return _properties(device).multi_processor_count if device.type == "cuda" else 1


def _section(streamed: torch.Tensor, heads_per_group: int = 1) -> int:
    """Return the number of head groups whose streamed pair of tensors (keys and values, or queries and gradients) fills
    half the L2 cache: a divisor of the number of groups."""
    groups = streamed.shape[1] // heads_per_group
    if streamed.device.type != "cuda":
        return groups
    cache = _properties(streamed.device).L2_cache_size
    per_group = 2 * streamed.shape[0] * heads_per_group * streamed.shape[2] * streamed.element_size()
    fitting = max(1, min(groups, cache // 2 // max(per_group, 1)))
    return max(size for size in range(1, fitting + 1) if groups % size == 0)


def _partial(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _loadable(tensor: torch.Tensor, tuning: Tuning) -> torch.Tensor:
    """Return the tensor itself if the kernels can load its layout, else a copy. Descriptors need adjacent heads and a
    head dimension that is a power of two; padding happens in memory, since padding on load would cost registers."""
    if not tuning.tma:
        return tensor if tensor.stride(2) == 1 else tensor.contiguous()
    head_dim = tensor.shape[2]
    if head_dim != padded_head_dim(head_dim):
        return torch.nn.functional.pad(tensor, (0, padded_head_dim(head_dim) - head_dim)).contiguous()
    flat = tensor.stride(2) == 1 and tensor.stride(1) == head_dim
    aligned = tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    flat = flat and tensor.stride(0) >= tensor.shape[1] * head_dim
    return tensor if flat and aligned else tensor.clone(memory_format=torch.contiguous_format)


def _source(tensor: torch.Tensor, rows: int, tuning: Tuning) -> torch.Tensor | TensorDescriptor:
    if not tuning.tma:
        return tensor
    tokens, heads, head_dim = tensor.shape
    return TensorDescriptor(tensor, [tokens, heads * head_dim], [tensor.stride(0), 1], [rows, head_dim])
