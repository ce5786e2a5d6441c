"""Linear attention over packed rows: the state is reset at every sample and passed between context-parallel ranks.

Layers of linear attention (gated delta nets) carry a recurrent state and the last inputs of a convolution, and their
forwards expect one sequence. Here the family's own forward runs on the samples of a row one by one. Under context
parallelism each rank has consecutive tokens of the row; if a sample continues on the next rank, its state is sent there
(the forward reads and writes states as in decoding). A rank first computes the sample whose state it sends, so ranks
wait for each other only if a sample spans more than two. Backward sends gradients back.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dilatant.attention.context_parallel import ContextParallelRow, PendingRows
from dilatant.attention.kernels.attention_plan import AttentionPlan
from dilatant.attention.kernels.scores import AttentionError
from dilatant.attention.masks.mask import PADDING, SAMPLE, AttentionMask

_ATTRIBUTES = (
    *("conv1d", "conv_dim", "conv_kernel_size", "A_log"),
    *("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
)
"""Attributes that identify the supported layers."""


class State(NamedTuple):
    """State of linear attention after the preceding tokens. `convolution` has the last inputs of its kernel, [1,
    channels, kernel - 1]; `memory` is float32 [1, heads, key size, value size]."""

    convolution: Tensor
    memory: Tensor


def linear_layers(model: nn.Module) -> list[nn.Module]:
    """Return the linear attention layers that support packed rows."""
    return [module for module in model.modules() if is_linear_attention(module)]


def is_linear_attention(module: nn.Module) -> bool:
    """Return whether `module` is a supported linear attention layer."""
    return all(hasattr(module, name) for name in _ATTRIBUTES)


def enable_packed_rows(model: nn.Module, keyword: str) -> None:
    """Make the linear attention of `model` run over the plan or context-parallel row passed as keyword `keyword`."""
    for module in linear_layers(model):
        if not isinstance(module, _OverRows):
            module.__class__ = _over_rows(cast(Any, type(module)), keyword)


class _OverRows:
    """Mixin for the class of a linear-attention layer: runs it on each sample of a packed row."""

    keyword: str
    cache_keyword: str

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan = kwargs.pop(self.keyword, None)
        run = cast(Any, super()).forward
        if not isinstance(plan, (AttentionPlan, ContextParallelRow)):
            return run(hidden_states, *args, **kwargs)
        kwargs |= {"attention_mask": None, self.cache_keyword: None}
        rows = hidden_states.flatten(0, 1)[None]
        if isinstance(plan, AttentionPlan):
            outputs = [run(piece, **kwargs) for piece in rows.split(_lengths(_samples(plan.mask)), 1)]
        else:
            outputs = _run_share(cast(Any, self), partial(run, **kwargs), rows, plan)
        return torch.cat(outputs, 1).view_as(hidden_states)


@cache
def _over_rows(own: Any, keyword: str) -> type[nn.Module]:
    named = {"__module__": own.__module__, "__doc__": own.__doc__}
    named |= {"keyword": keyword, "cache_keyword": cache_keyword(own.forward)}
    return type(own.__name__, (_OverRows, own), named)


def _samples(mask: AttentionMask) -> NDArray[np.int64]:
    """Return each token's sample as a distinct number; -1 for padding."""
    return np.where(mask.fields == PADDING, -1, mask.fields & SAMPLE)


def _lengths(numbers: NDArray[np.int64]) -> list[int]:
    """Return the length of each run of equal numbers."""
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return [end - first for first, end in pairwise(borders)]


def _run_share(layer: Any, run: Any, rows: Tensor, share: ContextParallelRow) -> list[Tensor]:
    """Run the layer on this rank's tokens `rows`, [1, own tokens, width], and return one output per sample or part of a
    sample. Raises AttentionError if the rank's tokens are not consecutive."""
    tokens = share.tokens
    if not tokens.size:
        return [run(rows)]
    first, last = int(tokens[0]), int(tokens[-1])
    if last - first + 1 != tokens.size:
        raise AttentionError("linear attention passes states along a row: ranks must have consecutive tokens of it")
    samples = _samples(share.mask)
    pieces = rows.split(_lengths(samples[tokens]), 1)
    enters = first > 0 and samples[first - 1] == samples[first]
    leaves = last + 1 < len(samples) and samples[last + 1] == samples[last]
    outputs: dict[int, Tensor] = {}
    # First run the piece whose state is sent, last the piece that receives a state; backward reverses the order.
    last_piece = len(pieces) - 1
    for number in (last_piece, *range(1, last_piece), 0):
        if number in outputs:
            continue
        piece = pieces[number]
        comes, goes = enters and number == 0, leaves and number == last_piece
        if not (comes or goes):
            outputs[number] = run(piece)
            continue
        link = _Neighbours(layer, share)
        carry = _BoundaryState(link.receive(piece) if comes else None, layer.conv_kernel_size - 1)
        output = run(piece, **{layer.cache_keyword: carry})
        outputs[number] = link.send(output, carry.after()) if goes else output
    return [outputs[number] for number in range(len(pieces))]


class _BoundaryState:
    """Replacement for transformers' cache: provides the state before a layer's tokens, and stores the state after them.
    Layers call its methods; in transformers 5.17 they access its `layers`."""

    record_past = True  # a single token is not a decoding step, which would overwrite states

    def __init__(self, before: State | None, kept: int) -> None:
        self._before = before
        self._kept = kept
        self._convolution: Tensor | None = None
        self._memory: Tensor | None = None

    def after(self) -> State:
        assert self._convolution is not None
        assert self._memory is not None
        return State(self._convolution, self._memory.float())

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return None if self._before is None else self._before.convolution

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        return None if self._before is None else self._before.memory

    def is_recording_past(self, layer: int) -> bool:
        return self.record_past

    def has_previous_state(self, layer: int, state_idx: int = 0) -> bool:
        return self._before is not None

    @property
    def layers(self) -> Mapping[int, _BoundaryState]:
        return defaultdict(lambda: self)

    @property
    def recurrent_states(self) -> tuple[Tensor | None]:
        return (self.get_recurrent_state(0),)

    def update_conv_state(self, inputs: Tensor, layer: int, **kwargs: Any) -> Tensor:
        """Return `inputs` [1, channels, tokens] with the earlier inputs prepended; store the last ones."""
        if self._before is not None:
            inputs = torch.cat([self._before.convolution, inputs], -1)
        missing = max(0, self._kept - inputs.shape[-1])
        self._convolution = functional.pad(inputs, (missing, 0))[..., inputs.shape[-1] + missing - self._kept :]
        return inputs

    def update_recurrent_state(self, state: Tensor, layer: int, **kwargs: Any) -> Tensor:
        self._memory = state
        return state


class _Neighbours:
    """Point-to-point transfer of one layer's states between a rank and its neighbours in the row."""

    def __init__(self, layer: Any, share: ContextParallelRow) -> None:
        self.group = share.group
        self.before, self.after = share.group.index - 1, share.group.index + 1
        self.layer = layer

    def receive(self, piece: Tensor) -> State:
        """Receive the state before `piece` from the previous rank; backward sends its gradient back."""
        # Weights and their requires_grad agree on all ranks, so a state has a gradient at both ends or at neither.
        return State(*_Receive.apply(self, piece, *self.layer.parameters()))

    def send(self, output: Tensor, state: State) -> Tensor:
        """Send `state` to the next rank; return `output`, whose backward first receives the gradient of `state`."""
        return _SendState.apply(self, output, state.convolution, state.memory)

    def empty(self, like: Tensor) -> State:
        layer = self.layer
        return State(
            like.new_empty(1, layer.conv_dim, layer.conv_kernel_size - 1),
            like.new_empty(1, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, dtype=torch.float32),
        )

    def exchange(self, what: str, tensors: Sequence[Tensor], rank: int) -> list[PendingRows]:
        """Start sends to or receives from `rank`."""
        transfer = self.group.send if what == "send" else self.group.receive
        return [transfer(each, self.group.ranks[rank], what="states of linear attention") for each in tensors]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Neighbours, piece: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.link, ctx.count = link, len(weights)
        state = link.empty(piece)
        for pending in link.exchange("receive", state, link.before):
            pending.wait()
        return tuple(state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        for pending in ctx.link.exchange("send", [each.contiguous() for each in gradients], ctx.link.before):
            pending.wait()
        return (None,) * (2 + ctx.count)


class _SendState(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Neighbours, output: Tensor, convolution: Tensor, memory: Tensor) -> Tensor:
        ctx.link, ctx.like = link, output.new_empty(0)
        for pending in link.layer.__dict__.pop(_SENT, ()):
            pending.wait()
        state = convolution.contiguous(), memory.contiguous()
        link.layer.__dict__[_SENT] = link.exchange("send", state, link.after)
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        state = ctx.link.empty(ctx.like)
        for pending in ctx.link.exchange("receive", state, ctx.link.after):
            pending.wait()
        return None, gradient, *state


_SENT = "states_under_way"
"""Attribute of a layer: its pending sends, which keep their tensors alive."""


_CACHES = ("cache", "past_key_values", "cache_params")
"""Since transformers 5.24 the name is `cache`; the older names are still accepted, but not together with it."""


def cache_keyword(forward: Callable[..., Any]) -> str:
    """Return the keyword by which `forward` takes the cache (keys, values and states of earlier tokens). Raises
    TypeError if `forward` takes none."""
    parameters = inspect.signature(forward).parameters
    for name in _CACHES:
        if name in parameters:
            return name
    raise TypeError(f"{getattr(forward, '__qualname__', forward)} takes no cache: {', '.join(parameters)}")
