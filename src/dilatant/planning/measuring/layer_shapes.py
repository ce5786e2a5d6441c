"""Layer shapes for the analytic cost model, read from configs and weight shapes; denoisers are counted on the meta
device. Their work grows with the picture, not with the rows of the language model that condition it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from dilatant.cost.analytic import LayerShape, block_shape, embedding_shape, head_shape, linear_shape
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.core.materialize import hollow_copy
from dilatant.models.experts.grouped_experts import fused_experts
from dilatant.models.generators.diffusion import Diffusion
from dilatant.models.generators.generator import GeneratorUnit
from dilatant.planning.measuring.kept_by_block import kept_by_block
from dilatant.planning.problem.describe_model import (
    BLOCK,
    CONNECTOR,
    EMBEDDING,
    ENCODER,
    GENERATOR,
    HEAD,
    NORM,
    PROJECTOR,
    LayerType,
    ModelDescription,
)

_WITHOUT_PAIRS = ("linear", "mamba", "recurrent", "conv", "ssm")
"""Words in a family's layer types for mixers whose work does not grow with the square of the tokens."""


def layer_shapes(model: ModelDescription, guess: bool = False) -> dict[str, LayerShape]:
    """Return the shape of every layer type. Mixtures of experts count the experts that a token visits, and all weights.

    guess: count a layer whose config says too little as one product with its matrices, instead of raising.
    """
    shapes = {}
    for entry in model.types:
        try:
            shapes[entry.kind] = _shape(entry)
        except (AttributeError, AssertionError, IndexError, KeyError, TypeError, ValueError):
            if not guess:
                raise
            shapes[entry.kind] = _plain_shape(entry)
        shapes[entry.kind] = replace(
            shapes[entry.kind], trained_share=_trained_share(entry), divided=entry.unit.structure is not None
        )
    return shapes


def counted_shapes(model: ModelDescription) -> dict[str, LayerShape]:
    """Return `layer_shapes` with what autograd keeps of blocks counted in their own forwards, and what follows it."""
    if not model.shapes:
        shapes = layer_shapes(model)
        counted = {entry.kind: kept_by_block(entry) for entry in model.types if entry.role == BLOCK}
        model.shapes.update({kind: replace(shape, **counted.get(kind, {})) for kind, shape in shapes.items()})
    return model.shapes


def _trained_share(entry: LayerType) -> float:
    """Return the share of the products of a layer with adapters whose weights train; 1 for other layers."""
    weights = {
        f"{path}.{name}": parameter
        for layer, path in entry.unit.pieces()
        if layer == entry.unit.layers[entry.index]
        for name, parameter in entry.unit.get_submodule(path).named_parameters()
        if parameter.dim() >= 2
    }
    if not any(is_adapter(name) for name in weights):
        return 1.0
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)
    return trained / sum(weight.numel() for weight in weights.values())


def _shape(entry: LayerType) -> LayerShape:
    modules, parameters = _modules(entry)
    products = sum(size for module in modules for size in _products(module, _experts_visited(entry)))
    width = entry.unit.width
    if entry.role == EMBEDDING and entry.geometry is None:
        return replace(embedding_shape(width, 1), parameters=parameters)
    if entry.role == EMBEDDING:
        return replace(linear_shape(max(products // width, 1), width), parameters=parameters)
    if entry.role == NORM:
        return LayerShape(0, 0, parameters, 2 * width, width, 2 * width, width)
    if entry.role == HEAD:
        return head_shape(width, cast(Any, entry.unit.model).get_output_embeddings().weight.shape[0])
    if entry.role == PROJECTOR:
        return _projector(entry, parameters)
    if entry.role == GENERATOR and isinstance(entry.unit.model, Diffusion):
        assert isinstance(entry.unit, GeneratorUnit)
        return denoiser_layer_shape(entry.unit, entry.index)
    if entry.role == CONNECTOR and isinstance(entry.unit, GeneratorUnit) and entry.unit.rows_see_each_other:
        return connector_shape(entry.unit)
    if entry.role in (ENCODER, CONNECTOR, GENERATOR) or entry.unit.config is None:
        return replace(linear_shape(max(products // width, 1), width), parameters=parameters)
    heads, key_value_heads, size = _heads(entry)
    causal = entry.geometry is None
    named = (each for module in modules for each in module.named_parameters())
    # Of the feed-forward: one weight for queries, keys and values may be wider.
    inner = max((max(one.shape) for name, one in named if not re.search("attn|attention", name)), default=width)
    shape = block_shape(
        width,
        inner,
        heads,
        key_value_heads,
        head_size=size,
        gated=any("gate" in name for module in modules for name, _ in module.named_parameters()),
        causal=causal,
        norms=_moved_by_norms(modules, heads * size, key_value_heads * size),
    )
    pairs = not any(word in entry.variant for word in _WITHOUT_PAIRS)
    return replace(
        shape,
        matmul=products,
        leading=min(shape.leading, products),
        parameters=parameters,
        last=0,  # until counted
        attention_width=shape.attention_width if pairs else 0,
        routed_width=width * _experts_of_token(entry.unit.config)
        if any(True for module in modules for _ in fused_experts(module))
        else 0,
    )


def _plain_shape(entry: LayerType) -> LayerShape:
    modules, parameters = _modules(entry)
    products = sum(size for module in modules for size in _products(module, 1.0))
    width = max(entry.unit.width, 1)
    return replace(linear_shape(max(products // width, 1), width), parameters=parameters)


def _modules(entry: LayerType) -> tuple[list[nn.Module], int]:
    """Return the modules of a layer, and the number of their parameters."""
    name = entry.unit.layers[entry.index]
    modules = [entry.unit.get_submodule(path) for layer, path in entry.unit.pieces() if layer == name]
    return modules, sum(parameter.numel() for module in modules for parameter in module.parameters())


def _projector(entry: LayerType, parameters: int) -> LayerShape:
    assert entry.geometry is not None
    linears = [module for each in _modules(entry)[0] for module in each.modules() if isinstance(module, nn.Linear)]
    share = entry.geometry.tokens_per_row / entry.geometry.encoder_tokens
    if not linears:
        return LayerShape(0, 0, parameters, 0, 0, 0, entry.geometry.width, output_share=share, launches=0)
    shape = linear_shape(linears[0].in_features, linears[-1].out_features, share=share, count=len(linears))
    return replace(shape, parameters=parameters)


def _heads(entry: LayerType) -> tuple[int, int, int]:
    """Return (query heads, key and value heads, size of a head)."""
    config = entry.unit.config
    each = getattr(config, "per_layer_config", None)
    if each is not None:  # head sizes differ between layers
        config = each[entry.index - 1]
    heads = config.num_attention_heads
    return (
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _moved_by_norms(modules: list[nn.Module], query: int, key: int) -> tuple[float, float] | None:
    """Return the elements per token that norms keep, roughly, and that they read and write; None: there are none."""
    kept = moved = 0.0
    for module in modules:
        for path, part in module.named_modules():
            weight = getattr(part, "weight", None)
            if "norm" not in type(part).__name__.lower() or weight is None or weight.dim() != 1:
                continue
            name, elements, fused = path.rpartition(".")[2], weight.numel(), isinstance(part, nn.LayerNorm | nn.RMSNorm)
            if name.startswith(("q_", "k_", "query_", "key_")):  # of every head
                elements = query if name.startswith("q") else key
            kept += elements * (1 if fused else 3)
            moved += elements * (2 if fused else 18)
    return (kept, moved) if kept else None


def _experts_visited(entry: LayerType) -> float:
    """Return the share of its experts that a token visits; 1 without experts."""
    config = entry.unit.config
    there = next(
        (
            getattr(config, name)
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(config, name, None)
        ),
        0,
    )
    return _experts_of_token(config) / there if there else 1.0


def _experts_of_token(config: Any) -> int:
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1


def _products(module: nn.Module, visited: float) -> Iterator[int]:
    """Yield the multiply-adds for a token by weight: matrices and kernels once, experts by their visited share."""
    for path, inner in module.named_modules():
        if isinstance(inner, nn.Embedding):
            continue
        for name, parameter in inner.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            expert = "expert" in f"{path}.{name}" and "shared" not in path
            yield round(parameter.numel() * (visited if expert else 1.0))


def denoiser_layer_shape(unit: GeneratorUnit, layer: int) -> LayerShape:
    """Return the shape of a layer of a generator's net, or of the whole net if it is one layer. It is per row of the
    language model: a picture's work over its rows. The autoencoder's work has no backward."""
    hollow = hollow_copy(unit)
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
    connector = hollow_copy(unit).connector
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
