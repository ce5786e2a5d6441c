"""Selective recomputation: a recomputed block reuses its cached attention outputs and results of communication.

A recomputed block runs its forward twice. In the first run attention without dropout caches its output, and the tensors
besides queries, keys and values that its backward needs; the second run uses this cache. Attention saves little and is
expensive to recompute; the rest of a block is the opposite (Korthikanti et al. 2022, section 5, recompute attention
instead). Sums over ranks are cached as well, since they are small compared with the cost of communication.

The cache is independent of kernels: attention has a separate autograd graph without its inputs, which it receives once
the block has recomputed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

CachedInputs = tuple[Tensor | None, ...]


def attention_cache_contexts() -> tuple[RecomputeCache, RecomputeCache]:
    """Return the contexts of the first forward and of the recomputation: a `context_fn` for torch's `checkpoint`."""
    calls: list[_Call | Tensor] = []
    return RecomputeCache(calls, again=False), RecomputeCache(calls, again=True)


def cached_attention(attend: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Return `attend(*inputs)`; under `RecomputeCache` the result is cached, and the recomputation reuses it.

    `attend` computes one tensor from `inputs` and from values equal in both runs; it uses no random numbers.
    """
    if has_torch_function(inputs):
        return handle_torch_function(cached_attention, inputs, attend, *inputs)
    return attend(*inputs)


def cached_exchange(exchange: Callable[[Tensor | None], Tensor], value: Tensor) -> Tensor:
    """Return `exchange(None)` and cache it under `RecomputeCache`; in the recomputation, return `exchange(cached)`.

    `exchange` computes one tensor from `value` with other ranks; with a cached result it only builds the graph.
    """
    if has_torch_function((value,)):
        return handle_torch_function(cached_exchange, (value,), exchange, value)
    return exchange(None)


class RecomputeCache(TorchFunctionMode):
    """Context that caches attention (`cached_attention` and torch's SDPA) and `cached_exchange` results in `calls`;
    in the recomputation (`again`) it reuses them."""

    def __init__(self, calls: list[_Call | Tensor], again: bool) -> None:
        super().__init__()
        self._calls, self._again, self._next = calls, again, 0

    @property
    def nbytes(self) -> int:
        """Bytes cached so far."""
        return sum(call.nbytes for call in self._calls)  # tensors have `nbytes`, too

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is cached_attention:
            return self._keep(*args)
        if function is cached_exchange:
            return self._keep_exchange(*args)
        if function is functional.scaled_dot_product_attention:
            return self._keep_sdpa(function, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _keep_sdpa(
        self,
        sdpa: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return sdpa(query, key, value, mask, dropout_p, is_causal, **options)

        if dropout_p:  # recomputed, with the same random numbers
            return attend(query, key, value, attn_mask)
        return self._keep(attend, query, key, value, attn_mask)

    def _keep(self, attend: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in inputs):
            return attend(*inputs)
        if not self._again:
            self._calls.append(_Call(attend, inputs))
        self._next += 1
        return _Attend.apply(self._calls[self._next - 1], *inputs)

    def _keep_exchange(self, exchange: Callable[[Tensor | None], Tensor], value: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return exchange(None)
        self._next += 1
        if self._again:
            cached = self._calls[self._next - 1]
            assert isinstance(cached, Tensor)
            return exchange(cached)
        result = exchange(None)
        self._calls.append(result.detach())
        return result


class _Call:
    """One attention call with a separate autograd graph, which holds none of the inputs."""

    def __init__(self, attend: Callable[..., Tensor], inputs: CachedInputs) -> None:
        self.nbytes = 0
        self._counted: set[int] = set()
        self._recomputed_inputs: CachedInputs = ()
        self._storages = [None if t is None else t.untyped_storage().data_ptr() for t in inputs]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            root = torch.empty(0, requires_grad=True)
            copies = [t if t is None or not t.requires_grad else _Cut.apply(t.detach(), root) for t in inputs]
            self._edges = [
                None if t is None or not t.requires_grad else torch.autograd.graph.get_gradient_edge(t) for t in copies
            ]
            self.output = attend(*copies)
        self._count(self.output)

    def backward(self, gradient: Tensor, inputs: CachedInputs) -> list[Tensor | None]:
        """Return the gradients of `inputs`, which the caller passes as recomputed."""
        self._recomputed_inputs = inputs
        edges = [edge for edge in self._edges if edge is not None]
        gradients = iter(torch.autograd.grad(self.output, edges, gradient, allow_unused=True))
        self._recomputed_inputs = ()
        return [None if edge is None else next(gradients) for edge in self._edges]

    def _pack(self, tensor: Tensor) -> Any:
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.numel() and pointer in self._storages:
            return self._storages.index(pointer), tensor.shape, tensor.stride(), tensor.storage_offset()
        self._count(tensor)
        return tensor.detach()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, *layout = packed
        source = self._recomputed_inputs[place]
        assert source is not None
        return source.detach().as_strided(*layout)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._counted:
            self._counted.add(storage.data_ptr())
            self.nbytes += storage.nbytes()


class _Cut(torch.autograd.Function):
    """Input node of an attention's separate graph; unlike a leaf, it holds no tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Attend(torch.autograd.Function):
    """Autograd node that saves only the inputs, which the block recomputes."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor | None) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return call.output.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *ctx.call.backward(gradient, ctx.saved_tensors)
