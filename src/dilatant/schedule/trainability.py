"""The frozen rule: which stages have a backward at all, and which have weight gradients.

A layer has a weight gradient if it trains. It passes an input gradient on if anything before it, on any path through
any unit, trains. (Cornstarch, the thesis, eq. 3.2, with the exclusive prefix: the layer itself is excluded; all
encoders and projectors precede the language model.) A stage with neither runs forward only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dilatant.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Trainability:
    """Two flags per stage number: the stage runs a backward, and the stage has weight gradients."""

    backward: tuple[bool, ...]
    weight_gradient: tuple[bool, ...]


def trainability_of(plan: Plan, trainable: Mapping[str, Sequence[bool]]) -> Trainability:
    """Apply the frozen rule to a plan; `trainable[unit][layer]` says which layers train. Raises ValueError if a unit is
    missing or has fewer layers than its stages cover."""
    before: dict[str, bool] = {unit.name: False for unit in plan.units}
    for unit in plan.units:
        if unit.name not in trainable:
            raise ValueError(f"trainable says nothing about unit {unit.name!r}")
        for target in unit.feeds:
            before[target] |= before[unit.name] or any(trainable[unit.name])
    backward, weight_gradient = [], []
    for placed in plan.stages():
        flags = trainable[placed.unit]
        if placed.stage.end > len(flags):
            raise ValueError(
                f"unit {placed.unit!r} has {len(flags)} layers, but a stage ends at layer {placed.stage.end}"
            )
        ahead = before[placed.unit] or any(flags[: placed.stage.first])
        own = any(flags[placed.stage.first : placed.stage.end])
        backward.append(ahead or own)
        weight_gradient.append(own)
    return Trainability(tuple(backward), tuple(weight_gradient))


def all_trainable(plan: Plan) -> Trainability:
    """Return the trainability of a plan in which every layer of every unit trains."""
    return trainability_of(
        plan, {unit.name: [True] * max(s.end for r in unit.replicas for s in r.stages) for unit in plan.units}
    )
