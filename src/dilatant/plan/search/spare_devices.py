"""Spare devices: add one more pipeline on the devices that a plan leaves idle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilatant.plan.layouts.option_table import ChainRequest
from dilatant.plan.layouts.space import Space
from dilatant.plan.limits import MAX_EXTENDED_CANDIDATES
from dilatant.plan.plan import Plan
from dilatant.plan.rank_mapping import replicas_of
from dilatant.plan.search.candidates import PlanCandidate


def promising(space: Space, found: Sequence[PlanCandidate], best: float) -> list[PlanCandidate]:
    """Return, best first, the candidates that could beat `best` seconds if their idle devices shared the work.

    Candidates with unequal numbers of replicas per unit, or with chunks, are excluded.
    """
    devices = space.cluster.num_devices
    with_idle = [
        one
        for one in found
        if one.gpus < devices and one.is_uniform and one.estimate * one.gpus / devices < best
    ]
    return sorted(with_idle, key=lambda one: one.estimate * one.gpus)[:MAX_EXTENDED_CANDIDATES]


def with_extra_pipeline(plan: Plan, candidate: PlanCandidate, space: Space) -> Iterator[Plan]:
    """Yield the plan with one more pipeline on its idle devices, for all degrees that leave less than one group idle.

    The language model has one stage per group of ranks, cut independently, with all encoders in the first. Slower
    pipelines get fewer samples (`schedule.assignment.step_assignment`). Yields nothing for models with generators.
    """
    roles, cluster = space.roles, space.cluster
    if roles.generators:
        return
    idle = sorted({*range(cluster.num_devices)} - {*plan.ranks})
    for degrees in space.table.units.all_degrees([*roles.encoders, roles.language]):
        groups = _groups(idle, degrees.ranks, cluster.gpus_per_node)
        groups = groups[: space.model.unit(roles.language).most_stages]
        share = len(groups) * degrees.ranks / cluster.num_devices
        if not groups or share * space.global_batch < 1:
            continue
        samples = max(1, round(share * space.global_batch / candidate.num_microbatches))
        shape = roles.language, degrees, len(groups), samples, candidate.num_microbatches
        option = space.table.chain(ChainRequest(*shape, roles.encoders), 0)
        if option is not None:
            ranks = {(0, 0, number): group for number, group in enumerate(groups)}
            added = {
                unit.name: replicas_of(unit.name, option.chain, len(unit.layers), 0, ranks)
                for unit in space.model.units
            }
            yield Plan(
                tuple(replace(unit, replicas=(*unit.replicas, *added[unit.name])) for unit in plan.units)
            )


def _groups(idle: list[int], width: int, per_node: int) -> list[tuple[int, ...]]:
    """Divide the idle ranks into groups of `width`, each on one node."""
    found = []
    for _, ranks in itertools.groupby(sorted(idle), lambda rank: rank // per_node):
        own = list(ranks)
        found += [tuple(own[at : at + width]) for at in range(0, len(own) - width + 1, width)]
    return found
