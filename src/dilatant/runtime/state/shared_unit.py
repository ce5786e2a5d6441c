"""Tensor- and expert-parallel units: initialize weights as one process would, and keep this rank's part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dilatant.comm.comm import Comm
from dilatant.comm.tensor_group import ExpertGroup, TensorGroup
from dilatant.models.core.materialize import materialize
from dilatant.models.core.slicing import held_blocks
from dilatant.models.core.stage import Stage
from dilatant.models.core.unit import Unit
from dilatant.models.language.language_stage import LanguageStage
from dilatant.models.parallel.tensor_parallel import shard_blocks, shard_experts, shard_vocabulary, with_weights
from dilatant.models.parallel.tensor_plan import tensor_plan
from dilatant.plan.boxes import Box
from dilatant.plan.plan import Stage as StagePlan
from dilatant.runtime.state.holders import slice_of
from dilatant.runtime.state.shared_groups import group_in


class ShardedUnit:
    """A transformers model sharded over tensor-parallel ranks, expert-parallel ranks or both. The unit itself is not
    changed: it stays whole, or on the meta device.

    placed: one of the unit's stages on this rank. boxes: logical name → this rank's part.
    """

    def __init__(self, unit: Unit, comm: Comm, placed: StagePlan, boxes: Mapping[str, Box]) -> None:
        self._unit = unit
        self._boxes = boxes
        self._plan = tensor_plan(unit)
        self._comm = comm
        self._ranks = TensorGroup(group_in(comm, "tensor", placed, placed.tp)) if placed.tp > 1 else None
        self._holders: dict[int, ExpertGroup] = {}  # by ep, which may differ between stages of a unit
        self._drawn: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}

    def materialize(self, first: int, end: int, seed: int | None, provided: Collection[str]) -> None:
        """Initialize one layer at a time, as a single process does, and keep this rank's part; see `materialize`."""
        unit = self._unit
        absent = {name for name, parameter in unit.named_logical_parameters() if parameter.is_meta}
        for layer in range(first, end):
            materialize(unit, layer, layer + 1, seed, provided)
            whole = dict(unit.named_logical_parameters())
            for name in self._names(layer, layer + 1):
                if name in whole and name not in self._drawn:
                    self._drawn[name] = self._cut(name, whole[name].detach(), name in provided)
            self._release(absent)

    def share(self, stage: Stage, placed: StagePlan) -> None:
        """Give `stage` separate modules that hold this rank's part of the weights of the `placed` layers."""
        first, end = placed.first, placed.end
        model = getattr(stage, "model", None)
        if model is None:  # a projector alone
            return
        held = dict(stage.named_logical_parameters())
        for name in self._names(first, end):
            if name in held and name not in self._parameters:
                drawn = self._drawn.pop(name).to(held[name].dtype)
                self._parameters[name] = nn.Parameter(drawn, requires_grad=held[name].requires_grad)
        own = {held[name]: self._parameters[name] for name in self._names(first, end) if name in held}
        inside = {weight.part for weight in stage.weights if getattr(stage, weight.part) is model}
        model = with_weights(model, own)
        for part in inside:
            setattr(stage, part, model)
        structure = self._unit.structure
        assert structure is not None
        blocks = held_blocks(model.get_submodule(structure.blocks))
        start = max(first - 1, 0)
        experts = self._plan.experts[start : start + len(blocks)]
        shard_experts(blocks, experts, self._ranks, self._holders_of(placed))
        if self._ranks is None:
            return
        regions = self._plan.regions[start : start + len(blocks)]
        stage.shards = shard_blocks(blocks, regions, experts, self._ranks, stage.read_blocks)
        if isinstance(stage, LanguageStage):
            whole = cast(PreTrainedModel, self._unit.model)
            rows, head_rows = (
                cast(nn.Linear, module).weight.shape[0]
                for module in (whole.get_input_embeddings(), whole.get_output_embeddings())
            )
            stage.vocabulary = shard_vocabulary(cast(PreTrainedModel, model), rows, head_rows, self._ranks)

    def _holders_of(self, placed: StagePlan) -> ExpertGroup | None:
        if placed.ep == 1:
            return None
        if placed.ep not in self._holders:
            self._holders[placed.ep] = ExpertGroup(group_in(self._comm, "experts", placed, placed.ep))
        return self._holders[placed.ep]

    def _names(self, first: int, end: int) -> dict[str, None]:
        layers = set(self._unit.layers[first:end])
        return dict.fromkeys(
            weight.canonical
            for weight in self._unit.weights
            if weight.layer in layers and getattr(self._unit, weight.part) is self._unit.model
        )

    def _cut(self, name: str, whole: Tensor, is_given: bool) -> Tensor:
        box = self._boxes[name]
        if is_given:  # filled in later
            return torch.empty(box.shape, dtype=whole.dtype)
        return slice_of(whole, box).clone() if box.is_whole else slice_of(whole, box)

    def _release(self, absent: Collection[str]) -> None:
        """Move whole weights back to the meta device if they came from there."""
        on_meta = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for name, parameter in self._unit.named_logical_parameters()
            if name in absent and not parameter.is_meta
        }
        for module in self._unit.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in on_meta:
                    module._parameters[key] = on_meta[id(parameter)]
