"""What a net that draws computes for a picture, counted on the meta device: its work grows with the picture, not with
the rows of the language model that tell it what to draw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from dilatant.cost.analytic import LayerShape
from dilatant.models.diffusion import Diffusion


def net_shape(model: Diffusion, width: int, tokens_per_item: int) -> LayerShape:
    """The shape of the layer that `model` is, per row of the language model: a picture's work over its rows.

    width: of a row. The autoencoder's work has no backward.
    """
    hollow = _hollow(model)
    rows = torch.randn(1, tokens_per_item, width, device="meta", requires_grad=True)
    seen = torch.randn(1, *model.shape, device="meta")
    times = torch.zeros(1, device="meta")
    products, kept, calls = _counted(lambda: hollow.say(seen, times, rows), hollow)
    encoded = 0
    if model.vae is not None:
        pixels = torch.randn(1, *model.pixels, device="meta")
        with torch.no_grad():
            encoded, _, _ = _counted(lambda: hollow.encode(pixels), hollow)
    return LayerShape(
        matmul=products // tokens_per_item,
        leading=0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kept=kept / tokens_per_item,
        weight_kept=kept / tokens_per_item,
        traffic=2 * kept / tokens_per_item,
        output_width=0,
        launches=calls,
        forward_only=encoded // tokens_per_item,
    )


def _hollow(model: Diffusion) -> Diffusion:
    """The same without memory for weights."""
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo: dict[int, Any] = {key: _on_meta(tensor) for key, tensor in held.items()}
    return copy.deepcopy(model, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _counted(call: Callable[[], Tensor], module: nn.Module) -> tuple[int, int, int]:
    """(multiply-adds, numbers kept for the backward that are no weights, modules that are called)."""
    weights = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        base = tensor if tensor._base is None else tensor._base
        if id(base) not in weights:
            kept[tensor.untyped_storage()._cdata] = base.numel()
        return tensor

    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    leaves = [one.register_forward_hook(count) for one in module.modules() if not any(one.children())]
    try:
        with FlopCounterMode(display=False) as flops, saved_tensors_hooks(note, lambda tensor: tensor):
            call()
    finally:
        for handle in leaves:
            handle.remove()
    return flops.get_total_flops() // 2, sum(kept.values()), calls
