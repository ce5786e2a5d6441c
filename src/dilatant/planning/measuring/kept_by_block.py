"""Bytes that autograd keeps of a block, counted in its own forward on tensors that have shapes but no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from dilatant.cost.profile import saved_bytes
from dilatant.models.core.slicing import held_blocks
from dilatant.planning.measuring.layer_probes import OneLayer, layer_probe
from dilatant.planning.problem.describe_model import LayerType

_TOKENS = 256
_HOST, _META = torch.device("cpu"), torch.device("meta")


def kept_by_block(entry: LayerType) -> dict[str, Any]:
    """Return `kept`, `weight_kept` and `weight_only` of the shape of a block in bf16 (see `LayerShape`), in elements of
    two bytes per token, and `last`; nothing if its forward needs values, as with flash-linear-attention, whose kernels
    read memory.

    Attention keeps what a fused kernel does. Experts are visited evenly. Everything else is what the family's forward
    runs without further packages: linear attention, for one, in torch, with chunks in fp32.
    """
    if entry.unit.structure is None:
        return {}
    probe = layer_probe(entry, _META, torch.bfloat16)
    try:
        layer = cast(OneLayer, probe.build())
        with ShapesOnly():
            (value,), keywords = probe.inputs(min(probe.tokens or (_TOKENS,)))
            value.requires_grad_()
            blocks = held_blocks(cast(Any, layer.stage).model.get_submodule(entry.unit.structure.blocks))
            kept, weight, _ = saved_bytes(layer, lambda: layer(value, **keywords), blocks)
            last = _after_last_saved(lambda: layer(value, **keywords))
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
            frozen, _, _ = saved_bytes(layer, lambda: layer(value, **keywords), blocks)
    except Exception:  # whatever a family's forward, or a kernel that it calls, raises without values
        return {}
    each = 2 * value.shape[:-1].numel()
    found = {"kept": kept / each, "weight_kept": weight / each, "weight_only": (kept - frozen) / each}
    return {**found, "last": last // each}


def _after_last_saved(forward: Callable[[], Tensor]) -> int:
    """Return the floating-point operations of the products that `forward` computes after the last tensor that autograd
    saves: where torch's checkpoint ends a recomputation."""
    before = 0
    with FlopCounterMode(display=False) as flops:

        def note(tensor: Tensor) -> Tensor:
            nonlocal before
            before = flops.get_total_flops()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            forward()
    return flops.get_total_flops() - before


class ShapesOnly(TorchFunctionMode):
    """Keep new floating-point tensors on the meta device, and integers, whose values forwards read, in host memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") == functional.scaled_dot_product_attention.__name__:
            return _attention(*args, **{"attn_mask": None, **named} if len(args) < 4 else named)
        tensors = [one for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
        on_host = not any(one.is_meta for one in tensors)
        if func is torch.bincount and not on_host:
            experts = named["minlength"]
            return (torch.arange(experts) + len(args[0])) // experts  # sums to the number of rows
        if not on_host:
            args, named = tree_map(_on_meta, (args, named))
        result = func(*args, **named)
        # What has values keeps them, wherever it is moved; new integers have values.
        if on_host and isinstance(result, Tensor) and result.is_meta and (tensors or not result.is_floating_point()):
            args, named = tree_map(lambda one: _HOST if isinstance(one, torch.device) else one, (args, named))
            result = func(*args, **named)
        return result


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *_: Any, **named: Any) -> Any:
    """Attend as torch does, which makes and keeps a mask in the query's dtype of each mask of booleans."""
    mask = attn_mask.to(_META, query.dtype) if attn_mask is not None and attn_mask.dtype == torch.bool else attn_mask
    return _FusedAttention.apply(query, key, value, mask)


class _FusedAttention(torch.autograd.Function):
    """Attention without values that keeps what a fused kernel keeps: its inputs, output and a number for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shape, alike = query.shape[:-1], query.shape[-1] == value.shape[-1]
        output = torch.empty_like(query) if alike else query.new_empty(*shape, value.shape[-1])  # in memory as queries
        ctx.save_for_backward(query, key, value, mask, output, query.new_empty(shape, dtype=torch.float32))
        return output


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.to(_META)
    return _META if isinstance(value, torch.device) else value
