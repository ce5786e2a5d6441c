"""How to measure this model's layers: single layers with random weights, and inputs such as training gives them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.attention.kept import keep_attention
from dilatant.cost.profile import LayerProbe
from dilatant.models.dtype import hold_in
from dilatant.models.language import LanguageUnit
from dilatant.models.materialize import materialize
from dilatant.models.stage import Stage
from dilatant.models.unit import Unit
from dilatant.profiling.describe_model import LayerType
from dilatant.runtime.weight_gradients import WeightGradients, replace_linears


def layer_probe(entry: LayerType, device: torch.device, dtype: torch.dtype) -> LayerProbe:
    """The probe of a layer type on one device. Tokens of an encoder are rounded to whole images or clips."""
    return LayerProbe(
        kind=entry.kind,
        build=lambda: _build(entry, device, dtype),
        keep=keep_attention,
        inputs=lambda tokens: _inputs(entry, tokens, device, dtype),
    )


class OneLayer(nn.Module):
    """One layer of a unit as a function of tensors."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, value: Tensor, **given: Any) -> Tensor:
        """`value`: hidden states, or what the unit's first layer takes. Returns hidden states, or the head's loss."""
        return self.stage.one_layer(value, **given)


def _build(entry: LayerType, device: torch.device, dtype: torch.dtype) -> OneLayer:
    unit: Unit = copy.deepcopy(entry.unit)
    materialize(unit, entry.index, entry.index + 1, seed=0)
    hold_in(unit, dtype)
    unit.recompute("none")  # what that takes, and chunks of the loss, follows from what the whole does
    if isinstance(unit, LanguageUnit):
        unit.loss_chunk = None
    stage = unit.stage(entry.index, entry.index + 1)
    for parameter in stage.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
    replace_linears(
        stage, WeightGradients(), stage.undeferred
    )  # as the runtime runs them; tiny layers feel the difference
    return OneLayer(stage).to(device).train()


def _inputs(
    entry: LayerType, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor], dict[str, Any]]:
    value, given = entry.unit.example(entry.index, tokens, device)
    return (value.to(dtype) if value.is_floating_point() else value,), given
