"""Tiny whole models as units, and their loss by the very stages that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import prefer_row_attention
from dilatant.models.stage import StepData, stage_tensors
from dilatant.models.whole import Whole
from tiny_wholes import whole_config


def opened(family: str, weights: Mapping[str, torch.Tensor] | None = None, **options: Any) -> MultimodalModel:
    """The units of a tiny model, with `weights` by transformers' keys."""
    model = MultimodalModel({}, Whole.of(whole_config(family), "model", **options), seed=0)
    with torch.no_grad():
        for unit in model.units.values():
            tensors = stage_tensors(unit)
            for weight in unit.weights if weights is not None else ():
                key = model.whole.key_of(unit, weight)
                if key in weights:
                    tensors[weight.canonical].copy_(weights[key])
    prefer_row_attention(model)
    return model.train()


def losses_of(model: MultimodalModel, samples: list[EncodedSample], cut: bool) -> torch.Tensor:
    """The loss of all samples in one microbatch, of whole units or of a stage for every layer."""
    data = StepData.of(samples, model.graph.losses)
    numbers = tuple(range(len(samples)))
    inbound: dict[str, torch.Tensor] = {}
    for name, unit in model.units.items():
        count = len(unit.layers)
        spans = [(at, at + 1) for at in range(count)] if cut else [(0, count)]
        given = dict(inbound)
        for first, end in spans:
            output = unit.stage(first, end).run(data, numbers, given)
            given = {name: output.rows_for(name)}
        inbound[name] = output.rows_for("language")
    return output.losses["language"]
