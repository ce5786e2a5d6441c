"""Placed units: candidates in which units have a different number of replicas, or kind of devices.

DistTrain's disaggregation finds one closed-form optimum with separate replicas per unit and puts encoders on other
devices than the language model's; here all candidates are searched, and the other devices may be of another kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from dilatant.plan.layouts.microbatch_counts import microbatch_counts
from dilatant.plan.layouts.space import Space
from dilatant.plan.modes import Mode
from dilatant.plan.roles import Roles
from dilatant.plan.search.candidates import PlanCandidate
from dilatant.plan.search.shapes import shapes
from dilatant.plan.search.units_beside import SeparateUnits


def placed_candidates(
    spaces: Sequence[Space],
    sizes: Sequence[int],
    microbatches: int | None = None,
    most_seconds: float = math.inf,
) -> Iterator[PlanCandidate]:
    """Yield candidates with some units on other device groups than the language model; one space for each group.
    Each layout of the language model, and of the units on its group, is joined with the most promising chains of the
    other units, whose numbers of replicas may differ. The bound covers all these chains. Estimates above `most_seconds`
    are omitted."""
    others = _others(spaces[0])
    for home in range(len(spaces)):
        for where in itertools.product(range(len(spaces)), repeat=len(others)):
            away = {unit: group for unit, group in zip(others, where) if group != home}
            if away:
                beside = SeparateUnits(spaces, home, away)
                yield from _candidates(beside, sizes, microbatches, most_seconds)


def separate_replica_candidates(
    space: Space, sizes: Sequence[int], microbatches: int | None = None, most_seconds: float = math.inf
) -> Iterator[PlanCandidate]:
    """Yield candidates on one group whose encoders or generators have a different number of replicas."""
    others = _others(space)
    for count in range(1, len(others) + 1):
        for chosen in itertools.combinations(others, count):
            beside = SeparateUnits([space], 0, dict.fromkeys(chosen, 0))
            yield from _candidates(beside, sizes, microbatches, most_seconds)


def _others(space: Space) -> list[str]:
    return [unit for unit in space.roles.units if unit != space.roles.language]


def _candidates(
    beside: SeparateUnits, sizes: Sequence[int], microbatches: int | None, most_seconds: float
) -> Iterator[PlanCandidate]:
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
