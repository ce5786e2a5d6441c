"""Denoiser shape: what a generator's net computes for a picture, counted on the meta device. Its work grows with the
picture, not with the rows of the language model that condition it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from dilatant.cost.analytic import LayerShape
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.generators.generator import GeneratorUnit


def denoiser_layer_shape(unit: GeneratorUnit, layer: int) -> LayerShape:
    """Return the shape of a layer of a generator's net, or of the whole net if it is one layer, per row of the language
    model: a picture's work over its rows. The autoencoder's work has no backward."""
    hollow = _hollow(unit)
    model: Any = hollow.model
    assert isinstance(model, Diffusion)
    items, last = hollow.tokens_per_item, len(hollow.layers) - 1
    rows = torch.randn(1, items, hollow.width, device="meta", requires_grad=True)
    seen = torch.randn(1, *model.shape, device="meta")
    times = torch.zeros(1, device="meta")
    if hollow.cut is None:
        products, kept, calls = _counted(lambda: model.predict(seen, times, rows), model)
    else:
        first: Any = hollow.stage(1, 2).model
        head: Any = hollow.stage(last, last + 1).model
        between = first.enter(seen, times, rows)
        if layer == 1:
            products, kept, calls = _counted(lambda: first.enter(seen, times, rows).patches, first)
        elif layer == last:
            products, kept, calls = _counted(lambda: head.leave(between), head)
        else:
            cut, block = hollow.cut, hollow.blocks[layer - 2]
            products, kept, calls = _counted(lambda: cut.block(model.net, block, between).patches, block)
    encoded = 0
    if layer == 1 and model.encoder is not None and not model.targets.are_stored:
        pixels = torch.randn(1, *model.targets.pixels, device="meta")
        with torch.no_grad():
            encoded, _, _ = _counted(lambda: model.encode(pixels), model)
    passed_on = 0 if layer == last else hollow.rows_between * hollow.boundary(layer + 1, unit.unit).width
    shape = _shape_of_item(unit, layer, products, kept, calls)
    return replace(shape, output_width=passed_on // items, forward_only=encoded // items)


def connector_shape(unit: GeneratorUnit) -> LayerShape:
    """Return the shape, per row, of a connector in which the rows of an item see each other."""
    connector = _hollow(unit).connector
    rows = torch.randn(unit.tokens_per_item, unit.width_in, device="meta", requires_grad=True)
    counted = _counted(lambda: connector(rows), connector)
    return replace(_shape_of_item(unit, 0, *counted), output_width=unit.width)


def _shape_of_item(unit: GeneratorUnit, layer: int, products: int, kept: int, calls: int) -> LayerShape:
    """Return the shape per row of the language model, from what is counted for one item."""
    own = [weight for weight in unit.weights if weight.layer == unit.layers[layer]]
    sizes = {name: parameter.numel() for name, parameter in unit.named_logical_parameters()}
    items = unit.tokens_per_item
    return LayerShape(
        matmul=products // items,
        leading=0,
        parameters=sum(sizes.get(weight.canonical, 0) for weight in own),
        kept=kept / items,
        weight_kept=kept / items,
        traffic=2 * kept / items,
        output_width=0,
        launches=calls,
    )


def _hollow(unit: GeneratorUnit) -> GeneratorUnit:
    """Return a copy of the unit on the meta device."""
    held = {id(tensor): tensor for tensor in (*unit.parameters(), *unit.buffers())}
    memo: dict[int, Any] = {key: _on_meta(tensor) for key, tensor in held.items()}
    return copy.deepcopy(unit, memo)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _counted(call: Callable[[], Tensor], module: nn.Module) -> tuple[int, int, int]:
    """Return (multiply-adds, numbers kept for the backward that are no weights, modules that are called)."""
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
