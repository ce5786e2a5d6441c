"""Layer probes: single layers with random weights, and inputs such as training gives them, to be measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dilatant.attention.context_parallel import PendingRows
from dilatant.attention.recompute_cache import attention_cache_contexts
from dilatant.cost.profile import LayerProbe
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.core.dtype import cast_weights, quantize
from dilatant.models.core.materialize import hollow_copy, materialize
from dilatant.models.core.slicing import held_blocks
from dilatant.models.core.stage import Stage
from dilatant.models.core.unit import Unit
from dilatant.models.language.language import LanguageUnit
from dilatant.models.language.language_stage import LanguageStage
from dilatant.models.parallel.tensor_parallel import shard_tokens
from dilatant.models.parallel.tensor_plan import tensor_plan
from dilatant.models.parallel.tensor_regions import Region
from dilatant.planning.problem.describe_model import BLOCK, HEAD, LayerType
from dilatant.runtime.state.fp8_products import fp8_products
from dilatant.runtime.state.weight_gradients import WeightGradients, replace_linears

_ROWS = (1, 2, 4, 8)
"""Numbers of images or clips at which layers of encoders and denoisers are measured; multiples of them on a GPU."""
LONG_ROW = 16384
"""Tokens of the longest rows on GPUs, which are measured there."""


def layer_probe(
    entry: LayerType,
    device: torch.device,
    dtype: torch.dtype,
    dense_tokens: Sequence[int] = (),
    row: tuple[int, ...] = (),
) -> LayerProbe:
    """Return the probe of a layer type on one device. Tokens of an encoder are whole images or clips. dense_tokens:
    lengths at which a block's rows of two samples are measured; row: samples of a longer row of a block."""
    items, unit = entry.item_tokens, entry.unit
    times = 1 if device.type != "cuda" or items is None else max(1, LONG_ROW // (_ROWS[-1] * items))

    def packed(lengths: Sequence[int]) -> tuple[tuple[Tensor], dict[str, Any]]:
        value, keywords = cast(LanguageUnit, unit).packed_example(entry.index, lengths, device)
        return (value.to(dtype),), keywords

    is_language_block = entry.role == BLOCK and isinstance(unit, LanguageUnit)
    return LayerProbe(
        kind=entry.kind,
        build=lambda: _build(entry, device, dtype),
        keep=attention_cache_contexts,
        checkpoint_share=1 / entry.unit.shared_by if _regions(entry) else 1.0,
        before_chunks=_before_head if entry.role == HEAD else None,
        packed=packed if is_language_block else None,
        row=row if is_language_block else (),
        dense=tuple(dense_tokens) if is_language_block else (),
        blocks=_blocks if is_language_block else None,
        inputs=lambda tokens: _inputs(entry, tokens, device, dtype),
        tokens=None if items is None else tuple(times * rows * items for rows in _ROWS),
        square=items is None,
    )


class OneLayer(nn.Module):
    """One layer of a unit as a function of tensors."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: Tensor, **keywords: Any) -> Tensor:
        """Run the layer on hidden states, or what the unit's first layer takes; return hidden states or a head's
        loss."""
        return self.stage.one_layer(value, **keywords)


def _before_head(layer: nn.Module) -> Callable[..., Tensor]:
    stage = cast(LanguageStage, cast(OneLayer, layer).stage)

    def run(value: Tensor, labels: Tensor, **keywords: Any) -> Tensor:
        return stage.hidden_states(None, None, value, **keywords)

    return run


def _blocks(layer: nn.Module) -> Sequence[nn.Module]:
    stage = cast(LanguageStage, cast(OneLayer, layer).stage)
    return held_blocks(stage.model.get_submodule(stage.text.blocks))


def _build(entry: LayerType, device: torch.device, dtype: torch.dtype) -> OneLayer:
    unit: Unit = hollow_copy(entry.unit) if device.type == "meta" else copy.deepcopy(entry.unit)
    if device.type != "meta":
        materialize(unit, entry.index, entry.index + 1, seed=0)
    cast_weights(unit, dtype)
    unit.recompute("none")  # costs with it, and with loss chunks, are derived
    if isinstance(unit, LanguageUnit):
        unit.loss_chunk = None
    stage = unit.stage(entry.index, entry.index + 1)
    if regions := _regions(entry):
        assert unit.structure is not None
        blocks = cast(Any, stage).model.get_submodule(unit.structure.blocks)
        stage.shards = shard_tokens(held_blocks(blocks), [regions], _SingleRankGroup(unit.shared_by))
    quantize(stage, unit.four_bit, device)
    adapted = any(is_adapter(weight.name) for weight in stage.weights)
    for parameter in stage.parameters():
        if not adapted:  # else only adapters train
            parameter.requires_grad_(parameter.is_floating_point())
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    # As in the runtime; it matters for tiny layers.
    replace_linears(stage, WeightGradients(), stage.undeferred, fp8_products(stage, unit.fp8))
    return OneLayer(stage).to(device).train()


def _regions(entry: LayerType) -> Sequence[Region]:
    """Return the tensor-parallel regions of a block that several ranks share; none for a block with experts, or that
    reads an encoder's rows: these need all tokens between its regions."""
    if entry.unit.shared_by == 1:
        return ()
    plan = tensor_plan(entry.unit)
    regions = () if any(plan.experts) else plan.regions
    found = regions[entry.index - 1] if 0 < entry.index <= len(regions) else ()
    return () if any(region.whole for region in found) else found


class _SingleRankGroup:
    """Stand-in for a group of `size` ranks: it copies instead of communicating, which takes memory but hardly time."""

    index = 0
    rows_of_piece: int | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def all_gather(self, own: Tensor, what: str) -> tuple[Tensor, PendingRows]:
        return own.expand(self.size, *own.shape).contiguous(), _Done()

    def reduce_scatter(self, parts: Tensor, what: str) -> tuple[Tensor, PendingRows]:
        return parts.sum(0), _Done()

    def copy(self, hidden: Tensor) -> Tensor:
        return hidden

    def sum(self, part: Tensor) -> Tensor:
        return part


class _Done:
    def wait(self) -> None:
        pass


def _inputs(
    entry: LayerType, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor], dict[str, Any]]:
    value, keywords = entry.unit.example(entry.index, tokens, device)
    return (value.to(dtype) if value.is_floating_point() else value,), keywords
