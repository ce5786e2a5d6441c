"""Holders: the ranks that hold each weight under a plan; used for gradient groups, norms and state transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from dilatant.models.core.stage import stage_tensors
from dilatant.models.core.unit import Unit
from dilatant.models.parallel.tensor_plan import TensorPlan, tensor_plan
from dilatant.plan.boxes import Box, BoxIntervals, atoms
from dilatant.plan.buckets import HeldWeight, Holdings, holdings
from dilatant.plan.plan import Plan, Stage


def holdings_of(plan: Plan, units: Mapping[str, Unit]) -> Holdings:
    """Return which ranks hold which part of each parameter and buffer, in layer order of the units in plan order.

    A tied weight is one logical weight, held by the ranks of either of its layers.
    """
    weights = []
    for unit_plan in plan.units:
        unit = units[unit_plan.name]
        layers: dict[str, set[str]] = {}
        for weight in unit.weights:
            layers.setdefault(weight.canonical, set()).add(weight.layer)
        weights += [
            HeldWeight(name, frozenset(layers[name]), tuple(tensor.shape))
            for name, tensor in stage_tensors(unit).items()
        ]
    plans = tensor_plans(plan, units)

    def split(weight: HeldWeight, stage: Stage, place: int) -> tuple[BoxIntervals | None, bool]:
        own = plans.get(weight.name.partition(".")[0])
        if own is None:
            return None, False
        return own.held(weight.name, weight.shape, stage.degrees, place)

    return holdings(plan, {name: unit.layers for name, unit in units.items()}, weights, split)


def tensor_plans(plan: Plan, units: Mapping[str, Unit]) -> dict[str, TensorPlan]:
    """Return the tensor plans of the units that have a stage with tensor or expert parallelism."""
    wide = dict.fromkeys(p.unit for p in plan.stages() if p.stage.degrees.divides_weights)
    return {name: tensor_plan(units[name]) for name in wide}


def trained_by_layer(units: Mapping[str, Unit]) -> dict[str, list[frozenset[str]]]:
    """Return unit → for each layer, the logical names of its trainable weights; a tied weight is in two layers."""
    found = {}
    for name, unit in units.items():
        trained = {canonical for canonical, _ in unit.named_logical_parameters()} - unit.frozen
        layers: dict[str, set[str]] = {layer: set() for layer in unit.layers}
        for weight in unit.weights:
            if weight.canonical in trained:
                layers[weight.layer].add(weight.canonical)
        found[name] = [frozenset(names) for names in layers.values()]
    return found


def trainable_layers(units: Mapping[str, Unit]) -> dict[str, list[bool]]:
    """Return unit → for each layer, True if any of its weights trains."""
    return {name: [bool(names) for names in layers] for name, layers in trained_by_layer(units).items()}


def boxes_held_on(held: Holdings, rank: int) -> dict[str, Box]:
    """Return logical name → the part of the weight or buffer that `rank` holds."""
    return {name: holding.boxes[rank] for name, holding in held.items() if rank in holding.boxes}


def slice_of(tensor: Tensor, box: Box) -> Tensor:
    """Return the part `box` of a whole weight: a view if it is all of it, otherwise a copy."""
    if box.is_whole:
        return tensor
    own = tensor.new_empty(box.shape)
    for cell in box.cells():
        own[box.place(cell)] = tensor[Box.of(box.name, box.whole).place(cell)]
    return own


def written_cells(held: Holdings, rank: int) -> dict[str, tuple[Box, ...]]:
    """Return logical name → cells of weights without an optimizer that `rank`, their first holder, writes to
    checkpoints."""
    return {name: tuple(_first_of(holding.boxes, rank)) for name, holding in held.items() if rank in holding.boxes}


def _first_of(boxes: Mapping[int, Box], rank: int) -> Iterator[Box]:
    if not boxes[rank].size:  # no atom has any of it
        yield from (boxes[rank],) if rank == min(boxes) else ()
    for atom in atoms(boxes):
        if atom.ranks[0] == rank:
            yield atom.box
