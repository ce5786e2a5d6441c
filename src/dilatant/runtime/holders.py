"""Who holds which weight under a plan: the basis of gradient groups, of counting, and of moving state."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.models.unit import Unit
from dilatant.plan.plan import Plan

Holders = dict[str, tuple[int, ...]]
"""Logical name → ranks that hold it, ascending."""


def holders_of(plan: Plan, units: Mapping[str, Unit]) -> Holders:
    """The ranks that hold each parameter, in layer order of the units in plan order.

    A tied weight is one logical parameter, held where either of its layers is.
    """
    ranks: dict[str, set[int]] = {}
    layer_ranks: dict[str, set[int]] = {}
    for placed in plan.stages():
        for layer in units[placed.unit].layers[placed.stage.first : placed.stage.end]:
            layer_ranks.setdefault(layer, set()).update(placed.stage.ranks)
    for unit_plan in plan.units:
        unit = units[unit_plan.name]
        parameters = {name for name, _ in unit.named_logical_parameters()}
        for weight in unit.weights:
            if weight.canonical in parameters:
                ranks.setdefault(weight.canonical, set()).update(layer_ranks.get(weight.layer, ()))
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def trainable_layers(units: Mapping[str, Unit]) -> dict[str, list[bool]]:
    """Unit → for each layer, whether any of its weights trains (a tied weight trains in both of its layers)."""
    flags = {}
    for name, unit in units.items():
        parameters = {canonical for canonical, _ in unit.named_logical_parameters()}
        training = {
            weight.layer
            for weight in unit.weights
            if weight.canonical in parameters and weight.canonical not in unit.frozen
        }
        flags[name] = [layer in training for layer in unit.layers]
    return flags


def weights_held_on(plan: Plan, units: Mapping[str, Unit], rank: int) -> set[str]:
    """Logical names of the weights and buffers that `rank` holds."""
    layers = {
        layer
        for placed in plan.stages()
        if rank in placed.stage.ranks
        for layer in units[placed.unit].layers[placed.stage.first : placed.stage.end]
    }
    return {weight.canonical for unit in units.values() for weight in unit.weights if weight.layer in layers}


def lowest_holders(plan: Plan, units: Mapping[str, Unit]) -> dict[str, int]:
    """Logical name of every weight and buffer → the lowest rank that holds the layer it is named after."""
    lowest: dict[str, int] = {}
    for placed in plan.stages():
        for layer in units[placed.unit].layers[placed.stage.first : placed.stage.end]:
            lowest[layer] = min(lowest.get(layer, placed.stage.ranks[0]), *placed.stage.ranks)
    return {
        weight.name: lowest[weight.layer]
        for unit in units.values()
        for weight in unit.weights
        if weight.tied_to is None
    }
