"""One more pipeline on the devices that a plan leaves idle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dilatant.plan.layouts.space import Space
from dilatant.plan.plan import Plan, Replica, Stage
from dilatant.plan.search.candidates import Candidate

MOST_BASES = 4
"""Of so many plans with idle devices it is tried; they are those that promise most with it."""


def promising(space: Space, found: Sequence[Candidate], best: float) -> list[Candidate]:
    """The candidates that leave devices idle and could beat `best` seconds if these took their share of the work, the
    most promising first. Not those in which units have unlike numbers of replicas, or ranks several stages."""
    devices = space.cluster.num_devices
    with_idle = [
        one
        for one in found
        if one.gpus < devices
        and len(set(one.counts)) == 1
        and all(option.chunks == 1 for option in one.options)
        and one.estimate * one.gpus / devices < best
    ]
    return sorted(with_idle, key=lambda one: one.estimate * one.gpus)[:MOST_BASES]


def with_leftovers(plan: Plan, candidate: Candidate, space: Space) -> Iterator[Plan]:
    """The plan with one more pipeline on its idle devices: the language model in as many stages as there are groups of
    ranks, cut for itself, with all encoders in the first; for all degrees that leave fewer than a group idle.

    Slower pipelines get fewer samples of each step (`schedule.distribute`). None for models with generators.
    """
    roles, cluster = space.roles, space.cluster
    if roles.generators:
        return
    idle = sorted({*range(cluster.num_devices)} - {*plan.ranks})
    for tp, cp in space.table.units.degrees([*roles.encoders, roles.language]):
        groups = _groups(idle, tp * cp, cluster.gpus_per_node)
        groups = groups[: space.model.unit(roles.language).most_stages]
        share = len(groups) * tp * cp / cluster.num_devices
        if not groups or share * space.global_batch < 1:
            continue
        samples = max(1, round(share * space.global_batch / candidate.num_microbatches))
        option = space.table.chain(
            roles.language, tp, cp, len(groups), samples, candidate.num_microbatches, 0, roles.encoders
        )
        if option is not None:
            yield Plan(
                tuple(
                    replace(
                        unit,
                        replicas=(*unit.replicas, _replica(unit.name, option.cuts, groups, tp, cp, space)),
                    )
                    for unit in plan.units
                )
            )


def _replica(
    unit: str,
    cuts: Mapping[str, tuple[int, ...]],
    groups: list[tuple[int, ...]],
    tp: int,
    cp: int,
    space: Space,
) -> Replica:
    ends = (*cuts[unit][1:], len(space.model.unit(unit).layers))
    return Replica(
        tuple(Stage(first, end, ranks, tp, cp) for first, end, ranks in zip(cuts[unit], ends, groups))
    )


def _groups(idle: list[int], width: int, per_node: int) -> list[tuple[int, ...]]:
    """Groups of `width` of the idle ranks, each on one node."""
    found = []
    for _, ranks in itertools.groupby(sorted(idle), lambda rank: rank // per_node):
        own = list(ranks)
        found += [tuple(own[at : at + width]) for at in range(0, len(own) - width + 1, width)]
    return found
