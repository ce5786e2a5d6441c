"""Recomputation: change a plan that overflows memory so that it recomputes more activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dilatant.config.recompute import Recompute
from dilatant.plan.costs.score import PlanScore
from dilatant.plan.costs.unit_layers import LEVELS, UnitLayers
from dilatant.plan.plan import Plan


def recomputing(plan: Plan, by_unit: Mapping[str, tuple[Recompute, ...]]) -> Plan:
    """Return the plan with the recomputation of `by_unit` for the layers of these units."""
    return Plan(tuple(replace(unit, recompute=by_unit.get(unit.name, unit.recompute)) for unit in plan.units))


def more_recomputed(
    plan: Plan, score: PlanScore, units: UnitLayers, capacity_bytes: Sequence[float]
) -> Plan | None:
    """Raise the recomputation of all layers on overflowing ranks to the next cheapest level.
    Returns None if the ranks already recompute all they can, or the model fixes recomputation. capacity_bytes: per
    rank, in the order of `Plan.ranks`."""
    capacities = zip(plan.ranks, score.peak_bytes, capacity_bytes, strict=True)
    overflowing = {rank for rank, peak, most in capacities if peak > most}
    changed: dict[str, tuple[Recompute, ...]] = {}
    for unit in plan.units:
        if not units.is_free(unit.name):
            continue
        can = units.recomputable(unit.name)
        none: Recompute = "none"
        nothing = (none,) * len(can)
        layers: list[Recompute] = list(unit.recompute or nothing)
        held = np.zeros(len(can), dtype=bool)
        for replica in unit.replicas:
            for stage in replica.stages:
                if overflowing & {*stage.ranks}:
                    held[stage.first : stage.end] = True
        for layer in np.flatnonzero(held & can).tolist():
            layers[layer] = LEVELS[min(LEVELS.index(layers[layer]) + 1, len(LEVELS) - 1)]
        if tuple(layers) != (unit.recompute or nothing):
            changed[unit.name] = tuple(layers)
    return recomputing(plan, changed) if changed else None
