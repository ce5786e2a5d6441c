"""How to measure this model's layers: single layers with random weights, and inputs such as training gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dilatant.cost.profile import LayerProbe
from dilatant.models.materialize import materialize
from dilatant.models.stage import EncoderStage, LanguageStage, MultimodalOutput, Stage
from dilatant.models.unit import LanguageUnit, Unit
from dilatant.profiling.describe_model import EMBEDDING, HEAD, LayerType
from dilatant.runtime.precision import Precision
from dilatant.runtime.weight_gradients import WeightGradients, replace_linears


def layer_probe(entry: LayerType, device: torch.device, precision: Precision) -> LayerProbe:
    """The probe of a layer type on one device. Tokens of an encoder are rounded to whole images or clips."""
    language = entry.geometry is None
    return LayerProbe(
        kind=entry.kind,
        build=lambda: _build(entry, device, precision),
        inputs=lambda tokens: (
            _language_inputs(entry, tokens, device) if language else _encoder_inputs(entry, tokens, device)
        ),
    )


class OneLayer(nn.Module):
    """One layer of a unit as a function of tensors, under the precision of training."""

    def __init__(self, stage: Stage, call: Callable[..., Tensor], precision: Precision) -> None:
        super().__init__()
        self.stage = stage
        self._call = call
        self._precision = precision

    def forward(self, value: Tensor, **given: Tensor) -> Tensor:
        """`value`: hidden states, or what the unit's first layer takes. Returns hidden states, or the head's loss."""
        with self._precision.autocast(value.device):
            return self._call(self.stage, value, **given)


def _build(entry: LayerType, device: torch.device, precision: Precision) -> OneLayer:
    unit: Unit = copy.deepcopy(entry.unit)
    materialize(unit, entry.index, entry.index + 1, seed=0)
    stage = unit.stage(entry.index, entry.index + 1)
    for parameter in stage.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    replace_linears(stage, WeightGradients())  # as the runtime runs them; tiny layers feel the difference
    call = _run_language if entry.geometry is None else _run_encoder
    return OneLayer(stage, call, precision).to(device).train()


def _run_language(stage: LanguageStage, value: Tensor, **given: Tensor) -> Tensor:
    if not value.is_floating_point():
        result = stage(value, None, None, **given)
    else:
        result = stage(None, None, value, return_logits=False, **given)
    return result.loss if isinstance(result, MultimodalOutput) and result.loss is not None else result


def _run_encoder(stage: EncoderStage, value: Tensor) -> Tensor:
    return stage({stage.input_name: value}) if stage.is_first else stage(None, value)


def _language_inputs(
    entry: LayerType, tokens: int, device: torch.device
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    config = entry.unit.model.config.get_text_config()
    positions = torch.arange(tokens, device=device)[None]
    ids = torch.arange(tokens, device=device)[None] % config.vocab_size
    assert isinstance(entry.unit, LanguageUnit)
    given = {"position_ids": positions, **entry.unit.attention_of([ids[0].cpu().numpy()])}
    if entry.role == EMBEDDING:
        return (ids,), given
    hidden = torch.randn(1, tokens, config.hidden_size, device=device)
    return (hidden,), {**given, "labels": ids} if entry.role == HEAD else given


def _encoder_inputs(
    entry: LayerType, tokens: int, device: torch.device
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    geometry = entry.geometry
    assert geometry is not None
    rows = max(1, round(tokens / geometry.encoder_tokens))
    if entry.role == EMBEDDING:
        return (torch.randn(rows, *geometry.row_shape, device=device),), {}
    return (torch.randn(rows, geometry.encoder_tokens, geometry.width, device=device),), {}
