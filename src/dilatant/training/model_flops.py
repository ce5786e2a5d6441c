"""Model FLOPs: the floating-point operations that a training step requires, whatever computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dilatant.config import Config
from dilatant.cost.layer import trainable_before
from dilatant.data.sample import EncodedSample
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import HEAD, ModelDescription
from dilatant.planning.problem.planned_hardware import plan_target

FORWARD, BACKWARD = 2.0, 4.0
"""FLOPs per multiply-add: 2 in a product and in attention's forward, 4 in its backward (two products for each)."""


@dataclass(frozen=True, slots=True)
class UnitFlops:
    """Forward and backward FLOPs of one unit per token, per pair of tokens that could attend, and per target token.
    item_tokens: tokens of one item, which attend only within the item; None if all tokens of a sample attend."""

    token: float
    pair: float
    target: float
    item_tokens: float | None


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs that samples require of all units. They count real tokens (of images, by their real grids), no padding, and
    no recomputation. Frozen layers have no weight gradient, and no backward at all if nothing before them trains."""

    units: Mapping[str, UnitFlops]

    def of(self, samples: Sequence[EncodedSample]) -> float:
        """Return the FLOPs of a step with these samples, whose sizes are known."""
        total = 0.0
        for sample in samples:
            for name, unit in self.units.items():
                tokens = sample.sizes.get(name, 0)
                seen = tokens if unit.item_tokens is None else min(tokens, unit.item_tokens)
                total += unit.token * tokens + unit.pair * tokens * seen
                total += unit.target * sample.target_tokens if unit.target else 0.0
        return total


def model_flops(model: ModelDescription) -> ModelFlops:
    """Count FLOPs from the layers' shapes; a layer whose config says too little counts only its matrices."""
    shapes = layer_shapes(model, guess=True)
    heads = set(model.kinds(HEAD))
    units = {}
    for unit in model.spec.units:
        ahead = trainable_before(unit.trainable, model.spec.upstream_trainable(unit.name))
        token = pair = target = 0.0
        for layer, before in zip(unit.layers, ahead, strict=True):
            shape = shapes[layer.kind]
            goes_back = before or layer.trainable
            trained = shape.trained_share if layer.trainable else 0.0
            # If nothing before the layer trains, the products that take its input need no input gradient.
            inputs = (shape.matmul - (0 if before else shape.leading)) * goes_back
            product = FORWARD * (shape.matmul * (1 + trained) + inputs)
            if layer.kind in heads:
                target += product
            else:
                token += product
            attention = 2.0 * shape.attention_width * shape.attended_share
            pair += attention * (FORWARD + BACKWARD * goes_back)
        units[unit.name] = UnitFlops(token, pair, target, model.item_tokens.get(unit.name))
    return ModelFlops(units)


def peak_flops(config: Config) -> float | None:
    """Return the peak FLOP/s of this machine's GPU from its data sheet; None on a CPU or if unknown."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return None
    target = plan_target(config.cluster.model_copy(update={"hardware": None, "groups": None}), config.train)
    return target.hardware.peak_flops.get(target.dtype)
