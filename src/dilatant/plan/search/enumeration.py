"""Enumeration of all candidates of a search, most promising first."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dilatant.plan.layouts.microbatch_counts import microbatch_counts
from dilatant.plan.layouts.space import SMALL_CLUSTER, Space, are_few
from dilatant.plan.modes import EncoderPosition, Mode
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.disaggregated import disaggregated
from dilatant.plan.search.group_bound import least_seconds
from dilatant.plan.search.mixed_pipelines import mixed_candidates
from dilatant.plan.search.placed_units import placed_candidates, separate_replica_candidates
from dilatant.plan.search.shapes import shapes

FEWEST = 6
"""Minimum number of simulated candidates of each kind, however many devices there are."""
NEAR, WORTH = 1.1, 0.98
"""Units get separate replicas only if the estimate is below this multiple of the best other step: NEAR on more than
FEW devices, WORTH on many."""


def enumerate_candidates(
    space: Space,
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None = None,
    all_devices: bool = False,
    most_seconds: float = math.inf,
    far: float = math.inf,
) -> list[PlanCandidate]:
    """Return all candidates of a mode, lowest estimate first; with `all_devices` only those on the most devices.
    May omit candidates that surely take more than `most_seconds` or `far` times the best estimate and, with a finite
    `far` or on more than FEW devices, candidates with separate replicas per unit that are not notably faster."""
    found = list(_candidates(space, mode, sizes, microbatches, most_seconds, far))
    if mode is Mode.BEST:
        if far < math.inf or space.cluster.num_devices > SMALL_CLUSTER:
            best = min((candidate.estimate for candidate in found), default=math.inf)
            most_seconds = min(most_seconds, (WORTH if far < math.inf else NEAR) * best)
        found += separate_replica_candidates(space, sizes, microbatches, most_seconds)
    if all_devices and found:
        most = max(candidate.gpus for candidate in found)
        found = [candidate for candidate in found if candidate.gpus == most]
    # Among equal estimates, candidates that leave fewer devices idle come first.
    return sorted(found, key=lambda candidate: (candidate.estimate, -candidate.gpus))


def _candidates(
    space: Space, mode: Mode, sizes: Sequence[int], microbatches: int | None, most_seconds: float, far: float
) -> Iterator[PlanCandidate]:
    if mode in (Mode.BEST, Mode.DISTTRAIN):
        for one in disaggregated(space, sizes):
            if microbatches in (None, one.num_microbatches):
                yield one if mode is Mode.BEST else replace(one, estimate=one.disaggregated)
                most_seconds = min(most_seconds, far * one.estimate)
    if mode is Mode.DISTTRAIN:
        return
    for replicas in range(1, space.cluster.num_devices + 1):
        counts = microbatch_counts(space, mode, replicas, sizes, microbatches)
        for count, row_tokens in counts.items():
            for one in shapes(space, mode, replicas, count, row_tokens, most_seconds):
                yield one
                most_seconds = min(most_seconds, far * one.estimate)


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


def of_modes(
    space: Space,
    found: Sequence[PlanCandidate],
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None,
    all_devices: bool,
    most_seconds: float,
) -> Iterator[Sequence[PlanCandidate]]:
    """For mode BEST, yield the candidates of each published system, so that the result is no slower than theirs.
    Candidates with interleaved chunks form one more list: their estimates ignore the split backward that the others'
    count. most_seconds: as for `enumerate_candidates`."""
    if mode is not Mode.BEST:
        return
    yield sorted((one for one in found if one.disaggregated), key=lambda one: one.disaggregated)
    yield [  # Cornstarch's
        one
        for one in found
        if one.encoders_at is not EncoderPosition.IN_LANGUAGE and len(set(one.counts)) == 1
    ]
    yield [one for one in found if any(option.chunks > 1 for option in one.options)]
    for other in (Mode.ENTRAIN, Mode.MEGATRON):
        yield enumerate_candidates(space, other, sizes, microbatches, all_devices, most_seconds)


def spanning_candidates(
    spaces: Sequence[Space],
    alone: Sequence[Sequence[PlanCandidate]],
    sizes: Sequence[int],
    microbatches: int | None,
    all_devices: bool,
    most_seconds: float = math.inf,
) -> list[PlanCandidate]:
    """Return the candidates that span several device groups, best first; `alone`: those of each group alone.
    most_seconds: placements of units on other groups with larger estimates are omitted."""
    if are_few(spaces):
        spaces = [replace(space, shared=True) for space in spaces]
        alone = [enumerate_candidates(space, Mode.BEST, sizes, microbatches) for space in spaces]
    placed = list(placed_candidates(spaces, sizes, microbatches, most_seconds))
    mixed = mixed_candidates(spaces, alone, placed, least_seconds(spaces))
    found = sorted([*placed, *mixed], key=lambda one: (one.estimate, -one.gpus))
    most = max((one.gpus for one in found), default=0)
    return [one for one in found if not all_devices or one.gpus == most]


def all_candidates(
    spaces: Sequence[Space],
    mode: Mode,
    sizes: Sequence[int],
    microbatches: int | None = None,
    all_devices: bool = False,
) -> list[PlanCandidate]:
    """Return `enumerate_candidates` over groups of different devices, with one space per group."""
    asked = sizes, microbatches, all_devices
    if len(spaces) == 1:
        return enumerate_candidates(spaces[0], mode, *asked)
    alone = [
        [one.in_group(group) for one in enumerate_candidates(space, mode, *asked)]
        for group, space in enumerate(spaces)
    ]
    both = spanning_candidates(spaces, alone, *asked) if mode is Mode.BEST else []
    return sorted([*itertools.chain(*alone), *both], key=lambda one: (one.estimate, -one.gpus))
