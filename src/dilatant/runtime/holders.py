"""Who holds which weight under a plan: the basis of gradient groups, of counting, and of moving state."""

from __future__ import annotations

from collections.abc import Mapping

from dilatant.models.unit import Unit
from dilatant.plan.holdings import HeldWeight, Holdings, holdings
from dilatant.plan.plan import Plan


def holdings_of(plan: Plan, units: Mapping[str, Unit]) -> Holdings:
    """Who holds each parameter, in layer order of the units in plan order.

    A tied weight is one logical parameter, held where either of its layers is.
    """
    weights = []
    for unit_plan in plan.units:
        unit = units[unit_plan.name]
        parameters = dict(unit.named_logical_parameters())
        layers: dict[str, set[str]] = {}
        for weight in unit.weights:
            if weight.canonical in parameters:
                layers.setdefault(weight.canonical, set()).add(weight.layer)
        weights += [
            HeldWeight(name, frozenset(using), tuple(parameters[name].shape))
            for name, using in layers.items()
        ]
    return holdings(plan, {name: unit.layers for name, unit in units.items()}, weights)


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
