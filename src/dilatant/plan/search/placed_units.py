"""Candidates in which units have replicas of their own, as many as suit them, or are on devices of their own kind.

DistTrain's disaggregation gives every unit replicas of its own, by one optimum in closed form; here all are looked at.
It puts encoders on other devices than the language model's; that these may be of another kind, each unit where it runs
best, is what is added here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from dilatant.plan.layouts.microbatch_counts import microbatch_counts
from dilatant.plan.layouts.space import Space
from dilatant.plan.modes import Mode
from dilatant.plan.roles import Roles
from dilatant.plan.search.candidates import Candidate
from dilatant.plan.search.shapes import shapes
from dilatant.plan.search.units_beside import UnitsBeside


def placed_candidates(
    spaces: Sequence[Space],
    sizes: Sequence[int],
    microbatches: int | None = None,
    most_seconds: float = math.inf,
) -> Iterator[Candidate]:
    """Candidates of which some units are on other groups of devices than the language model; one space for each group.

    For each way to run the language model, and units beside it, the other units' chains that promise most with it; they
    may have fewer or more replicas. The bound is that of all of these. Left out are estimates above `most_seconds`.
    """
    others = _others(spaces[0])
    for home in range(len(spaces)):
        for where in itertools.product(range(len(spaces)), repeat=len(others)):
            away = {unit: group for unit, group in zip(others, where) if group != home}
            if away:
                beside = UnitsBeside(spaces, home, away)
                yield from _candidates(beside, sizes, microbatches, most_seconds)


def own_replicas(
    space: Space, sizes: Sequence[int], microbatches: int | None = None, most_seconds: float = math.inf
) -> Iterator[Candidate]:
    """The same on equal devices: units beside the language model's pipelines that have fewer or more replicas."""
    others = _others(space)
    for count in range(1, len(others) + 1):
        for chosen in itertools.combinations(others, count):
            beside = UnitsBeside([space], 0, dict.fromkeys(chosen, 0))
            yield from _candidates(beside, sizes, microbatches, most_seconds)


def _others(space: Space) -> list[str]:
    return [unit for unit in space.roles.units if unit != space.roles.language]


def _candidates(
    beside: UnitsBeside, sizes: Sequence[int], microbatches: int | None, most_seconds: float
) -> Iterator[Candidate]:
    space = beside.spaces[beside.home]
    here = Roles(
        tuple(unit for unit in space.roles.encoders if unit not in beside.away),
        space.roles.language,
        tuple(unit for unit in space.roles.generators if unit not in beside.away),
    )
    near = space.with_roles(here)
    for replicas in range(1, space.cluster.num_devices + 1):
        counts = microbatch_counts(space, Mode.BEST, replicas, sizes, microbatches)
        for count, row_tokens in counts.items():
            for one in shapes(near, Mode.BEST, replicas, count, row_tokens, most_seconds):
                yield from beside.joined(one, most_seconds)
