"""Enumeration of all candidates of a search, most promising first."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilatant.plan.layouts.space import Space, are_few
from dilatant.plan.limits import FEWEST, NEAR, SMALL_CLUSTER, WORTH
from dilatant.plan.roles import EncoderPosition
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.group_bound import least_seconds
from dilatant.plan.search.mixed_pipelines import mixed_candidates
from dilatant.plan.search.separate_units import placed_candidates, separate_replica_candidates
from dilatant.plan.search.shapes import shapes


def enumerate_candidates(
    space: Space, most_seconds: float = math.inf, most_times: float = math.inf
) -> list[PlanCandidate]:
    """Return all candidates on one group of devices, lowest estimate first.
    May omit candidates that surely take more than `most_seconds` or `most_times` the best estimate and, with a finite
    `most_times` or on more than SMALL_CLUSTER devices, candidates with separate replicas per unit that are not notably
    faster."""
    return _sorted(_enumerated(space, most_seconds, most_times), space.settings.all_devices)


def _enumerated(
    space: Space, most_seconds: float = math.inf, most_times: float = math.inf
) -> list[PlanCandidate]:
    found: list[PlanCandidate] = []
    pipelines = range(1, space.cluster.num_devices + 1)
    # Many pipelines come first where the best estimate so far limits the others: it is rarely of few.
    for replicas in pipelines if most_times == math.inf else reversed(pipelines):
        for count, row_tokens in space.microbatch_counts(replicas).items():
            for one in shapes(space, replicas, count, row_tokens, most_seconds):
                found.append(one)
                most_seconds = min(most_seconds, most_times * one.estimate)
    if most_times < math.inf or space.cluster.num_devices > SMALL_CLUSTER:
        best = min((candidate.estimate for candidate in found), default=math.inf)
        most_seconds = min(most_seconds, (WORTH if most_times < math.inf else NEAR) * best)
    return [*found, *separate_replica_candidates(space, most_seconds)]


def spanning_candidates(
    spaces: Sequence[Space],
    alone: Sequence[Sequence[PlanCandidate]],
    most_seconds: float = math.inf,
) -> list[PlanCandidate]:
    """Return the candidates that span several device groups, best first; `alone`: those of each group alone.
    most_seconds: placements of units on other groups with larger estimates are omitted."""
    if are_few(spaces):
        spaces = [replace(space, shared=True) for space in spaces]
        alone = [_sorted(_enumerated(space), all_devices=False) for space in spaces]
    placed = list(placed_candidates(spaces, most_seconds))
    mixed = mixed_candidates(spaces, alone, placed, least_seconds(spaces))
    return _sorted([*placed, *mixed], spaces[0].settings.all_devices)


def all_candidates(spaces: Sequence[Space]) -> list[PlanCandidate]:
    """Return `enumerate_candidates` over groups of different devices, with one space per group."""
    if len(spaces) == 1:
        return enumerate_candidates(spaces[0])
    alone = [
        [one.in_group(group) for one in enumerate_candidates(space)] for group, space in enumerate(spaces)
    ]
    return _sorted([*itertools.chain(*alone), *spanning_candidates(spaces, alone)], all_devices=False)


def _sorted(found: list[PlanCandidate], all_devices: bool) -> list[PlanCandidate]:
    """Sort by estimate; among equals, candidates that leave fewer devices idle come first."""
    most = max((one.gpus for one in found), default=0) if all_devices else 0
    return sorted(
        (one for one in found if one.gpus >= most),
        key=lambda candidate: (candidate.estimate, -candidate.gpus),
    )


def best_of_fewer(found: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """Return, best first, the candidates that are among the FEWEST best of those on at most as many devices.
    A search on fewer devices would simulate them, so with these included more devices never make a plan slower."""
    taken: list[int] = []
    chosen = []
    for candidate in found:
        if bisect.bisect_right(taken, candidate.gpus) < FEWEST:
            chosen.append(candidate)
        bisect.insort(taken, candidate.gpus)
    return chosen


def kinds_of(found: Sequence[PlanCandidate]) -> Iterator[Sequence[PlanCandidate]]:
    """Yield the candidates of each kind of plan, which are all represented in the simulations: estimates of different
    kinds err differently (those with interleaved chunks ignore the split backward that the others' count)."""
    yield [one for one in found if len(set(one.counts)) > 1]
    yield [
        one
        for one in found
        if one.encoders_at is not EncoderPosition.IN_LANGUAGE and len(set(one.counts)) == 1
    ]
    yield [one for one in found if any(option.chain.chunks > 1 for option in one.options)]
