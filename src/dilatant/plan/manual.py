"""Manual plans: build a plan from the user's replicas, stages, cuts and degrees of every unit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dilatant.config.degrees import Degrees
from dilatant.config.errors import list_problems
from dilatant.plan.costs.partition import partition_layers
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.plan import ParallelSpec, Plan, Replica, Stage, UnitPlan

Specs = Mapping[str, ParallelSpec]
"""Unit → its layout."""


def plan_from_specs(
    layers: Mapping[str, int],
    specs: Specs,
    feeds: Mapping[str, Sequence[str]],
    colocated: Mapping[str, str] | None = None,
) -> Plan:
    """Build the plan that `specs` describe.

    layers: unit → its number of layers, in the order of computation. feeds: unit → units that use its output.
    colocated: unit → the unit on whose ranks it runs, stage by stage (an encoder with the language model, or with
    another encoder); other units get separate ranks (Cornstarch's modality parallelism). Ranks are numbered unit by
    unit, replica by replica, stage by stage; stage `chunk * pp + group` is on the ranks of `group`. Without `cuts`,
    stages get equal numbers of layers.

    Raises UserError that lists every problem.
    """
    colocated = dict(colocated or {})
    problems = _problems(layers, specs, colocated)
    if problems:
        raise list_problems("this layout cannot be planned:", problems)
    units: dict[str, UnitPlan] = {}
    next_rank = 0
    # Units with separate ranks come first: colocated units need their hosts' ranks.
    for name in sorted(layers, key=lambda name: name in colocated):
        spec = specs[name]
        count = spec.num_stages
        bounds = [*(spec.cuts or (layers[name] * stage // count for stage in range(count))), layers[name]]
        width = spec.degrees.ranks
        replicas = []
        for replica in range(spec.replicas):
            if name in colocated:
                host = units[colocated[name]].replicas[replica].stages
                groups = [host[group].ranks for group in range(spec.pp)]
            else:
                end = next_rank + spec.pp * width
                groups = [tuple(range(first, first + width)) for first in range(next_rank, end, width)]
                next_rank = end
            replicas.append(
                Replica(
                    tuple(
                        Stage(first, end, groups[stage % spec.pp], *spec.degrees)
                        for stage, (first, end) in enumerate(itertools.pairwise(bounds))
                    )
                )
            )
        units[name] = UnitPlan(name, tuple(replicas), tuple(feeds.get(name, ())))
    return Plan(tuple(units[name] for name in layers))


def cut_by_seconds(
    specs: Specs, colocated: Mapping[str, str], units: UnitLayers, samples: Mapping[str, float]
) -> dict[str, ParallelSpec]:
    """Return the specs with missing cuts filled in so that the slowest stage is as fast as possible, as a search cuts.

    units: seconds of layers. samples: unit → samples in its mean microbatch. A one-stage unit on the ranks of another
    unit is added to that unit's first stage. Raises UserError when the costs lack a layer type or degree.
    """

    def cut(name: str, spec: ParallelSpec) -> ParallelSpec:
        if spec.cuts is not None or spec.num_stages == 1:
            return spec
        layers = units.layers(name, spec.degrees, samples[name]).on(spec.num_stages)
        guests = [
            units.layers(guest, own.degrees, samples[guest]).on(1)
            for guest, own in specs.items()
            if colocated.get(guest) == name and own.num_stages == 1
        ]
        seconds = layers.ahead_of(guests, one_ahead=False).seconds if guests else layers.seconds
        return replace(spec, cuts=partition_layers(seconds, spec.num_stages))

    return {name: cut(name, spec) for name, spec in specs.items()}


def cut_as_before(specs: Specs, plan: Plan, before: Plan) -> dict[str, ParallelSpec] | None:
    """Copy the cuts of `before` into specs without cuts; `plan` is the plan of the specs.

    Returns None unless both plans have the same ranks and degrees in the same places.
    """

    def shape(one: Plan) -> list[object]:
        return [
            (unit.name, [[(own.ranks, own.degrees) for own in each.stages] for each in unit.replicas])
            for unit in one.units
        ]

    if shape(plan) != shape(before):
        return None
    firsts = {unit.name: tuple(stage.first for stage in unit.replicas[0].stages) for unit in before.units}
    return {name: replace(spec, cuts=spec.cuts or firsts[name]) for name, spec in specs.items()}


def _problems(layers: Mapping[str, int], specs: Specs, colocated: Mapping[str, str]) -> list[str]:
    problems = [
        f"{name!r} is no unit of this model; it has {', '.join(layers)}"
        for name in [*specs, *colocated]
        if name not in layers
    ]
    problems += [f"unit {name!r} has no spec" for name in layers if name not in specs]
    for name, count in layers.items():
        spec = specs.get(name)
        if spec is None:
            continue
        for key in ("replicas", *Degrees._fields, "pp", "chunks"):
            if getattr(spec, key) < 1:
                problems.append(f"{name}: {key} is {getattr(spec, key)}; it must be at least 1")
        if spec.num_stages > count:
            asked = f"pp is {spec.pp}" + (f" with {spec.chunks} chunks" if spec.chunks > 1 else "")
            problems.append(f"{name}: {asked}, but the unit has only {count} layers")
        if spec.cuts is not None:
            rising = all(a < b for a, b in itertools.pairwise(spec.cuts))
            if len(spec.cuts) != spec.num_stages or spec.cuts[:1] != (0,) or not rising or spec.cuts[-1] >= count:
                wanted = f"{spec.num_stages} rising layer numbers from 0 to below {count}"
                problems.append(f"{name}: cuts {list(spec.cuts)} must be {wanted}")
        host = colocated.get(name)
        if host is None:
            continue
        if host in colocated:
            problems.append(f"{name}: it cannot be colocated with {host!r}, which is colocated itself")
        elif host in specs:
            other = specs[host]
            if spec.replicas > other.replicas or spec.pp > other.pp:
                problems.append(
                    f"{name}: {spec.replicas} replicas of {spec.pp} stages do not fit on {host!r}, which has "
                    f"{other.replicas} of {other.pp}"
                )
            if spec.degrees.ranks != other.degrees.ranks:
                problems.append(f"{name}: stages of tp x cp ranks as many as those of {host!r} can be colocated")
    return problems
