"""Mixed pipelines: candidates with different kinds of pipelines side by side on groups of different devices."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dilatant.plan.layouts.option import Option
from dilatant.plan.layouts.space import Space, are_few
from dilatant.plan.limits import MOST_KINDS
from dilatant.plan.roles import EncoderPosition
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.estimate import exposed_seconds

REMAINING_DELAY = 1 / 3
"""Fraction of the delay by the heaviest samples that remains in simulations: most of these samples go to faster
pipelines. Mean error of estimates: 12 % on 1,296 devices of two kinds, 5 % on 32; without this delay 31 % and 8 %."""


def mixed_candidates(
    spaces: Sequence[Space],
    found: Sequence[Sequence[PlanCandidate]],
    placed: Sequence[PlanCandidate],
    bound: float,
) -> Iterator[PlanCandidate]:
    """Yield combinations of promising pipelines on one group (`found`, by group) or spanning groups (`placed`).

    Each combination adds the best pipelines that fit on the remaining devices. All have equally many microbatches; each
    kind gets samples in proportion to its speed. bound: lower bound in seconds for all of them.
    """
    devices = [space.cluster.num_devices for space in spaces]
    most_kinds = None if are_few(spaces) else MOST_KINDS
    kinds = [_kinds(own, len(spaces), most_kinds, group) for group, own in enumerate(found)]
    both = _kinds(placed, len(spaces), most_kinds)
    counts = {count for by_count in (*kinds, both) for count in by_count}
    for count in sorted(counts):
        beside: list[list[PlanCandidate | None]] = [[None, *own.get(count, ())] for own in kinds]
        for members in itertools.product([None, *both.get(count, ())], *beside):
            there = [one for one in members if one is not None]
            fit = all(sum(one.gpus_in(group) for one in there) <= most for group, most in enumerate(devices))
            if len(there) > 1 and fit and _all_have_samples(there, spaces[0].global_batch):
                yield _side_by_side(there, spaces, bound)


def _all_have_samples(members: Sequence[PlanCandidate], batch: int) -> bool:
    """Return True if even the slowest kind has a sample for each of its pipelines."""
    together = sum(1.0 / one.estimate for one in members)
    return all(batch / one.estimate / together >= one.replicas for one in members)


def _kinds(
    candidates: Iterable[PlanCandidate], groups: int, most: int | None, home: int | None = None
) -> dict[int, list[PlanCandidate]]:
    """Return candidates that can be combined, by number of microbatches: the best on at most as many devices per group.
    home: the group whose devices all candidates use."""
    found: dict[int, list[PlanCandidate]] = defaultdict(list)
    for one in candidates:
        if one.is_uniform and one.row_tokens is None:
            found[one.num_microbatches].append(one)
    kept: dict[int, list[PlanCandidate]] = {}
    for count, own in found.items():
        own.sort(key=lambda one: (one.estimate, one.gpus))
        kept[count] = []
        taken: list[list[int]] = []
        for one in own:
            devices = [
                one.gpus_in(group) if home is None else one.gpus * (group == home) for group in range(groups)
            ]
            if not any(all(a <= b for a, b in zip(other, devices)) for other in taken):
                kept[count].append(one if home is None else one.in_group(home))
                taken.append(devices)
            if len(kept[count]) == most:
                break
    return kept


def _side_by_side(members: Sequence[PlanCandidate], spaces: Sequence[Space], bound: float) -> PlanCandidate:
    batch = spaces[0].global_batch
    speeds = np.array([1.0 / one.estimate for one in members])
    shares = speeds / speeds.sum()
    replicas, count = sum(one.replicas for one in members), members[0].num_microbatches
    options = tuple(
        _scaled(option, float(share)) for one, share in zip(members, shares) for option in one.options
    )
    groups = tuple(group for one in members for group in one.groups)
    positions = {one.encoders_at for one in members}
    return PlanCandidate(
        encoders_at=positions.pop() if len(positions) == 1 else EncoderPosition.MIXED,
        replicas=replicas,
        microbatch_size=max(1, round(batch / (replicas * count))),
        num_microbatches=count,
        options=options,
        counts=tuple(number for one in members for number in one.counts),
        estimate=float(1.0 / speeds.sum())
        + max(_delay(one, float(share), spaces) for one, share in zip(members, shares))
        + _sum_between_groups(options, groups, spaces),
        bound=bound,
        groups=groups,
    )


def _delay(one: PlanCandidate, share: float, spaces: Sequence[Space]) -> float:
    """Return the extra seconds by which the heaviest samples delay pipelines with a fraction of the samples.

    The fewer the samples, the larger the heaviest sample's part of a microbatch.
    """
    language = spaces[0].roles.language
    option, group = next(
        (option, group) for option, group in zip(one.options, one.groups) if language in option.chain.cuts
    )
    count = one.replicas * one.num_microbatches
    heavier = spaces[group].heaviest_sample * count / share - spaces[group].heaviest(count)
    return REMAINING_DELAY * share * max(0.0, heavier) * (option.total - option.slowest) / 2


def _scaled(option: Option, share: float) -> Option:
    """Return the chain with this fraction of the samples."""
    names = ("seconds", "backward", "work", "forward")
    times = {name: getattr(option.costs, name) * share for name in names}
    return replace(option, costs=replace(option.costs, **times))


def _sum_between_groups(options: Sequence[Option], groups: Sequence[int], spaces: Sequence[Space]) -> float:
    """Return the exposed seconds of gradient sync between groups, through the ports of the node with the most ranks."""
    slowest = 0.0
    for option, group in zip(options, groups, strict=True):
        cluster = spaces[group].cluster
        parts = min(cluster.gpus_per_node, option.chain.degrees.tp * option.stages)
        sums = 2 * parts * option.costs.gradient / cluster.between.bandwidth
        slowest = max(slowest, exposed_seconds(option, sums))
    return slowest
