"""How far the search's plan is from the best there is, on small cases where every plan can be tried.

    python -m benchmarks.planning.planning_quality [--cases N]

Drawn cases: an encoder of 1 to 3 layers and a language model of 1 to 4, parts of either frozen, on 2 to 6 devices, each
step in closed form (fill and the slowest rank), so that enumeration is exact. The enumeration is the tests' oracle,
which shares no code with the search. It has equal replicas of both units; where the search finds a faster plan with
unlike ones, that counts as a gap of 0.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass

from benchmarks import ROOT

sys.path.append(str(ROOT / "tests"))

import numpy as np
from numpy.typing import NDArray

from cases.model_cases import cost_model
from cases.search_cases import find, random_vlm
from dilatant.config.degrees import Degrees
from oracles.search import best_step, layer_seconds
from oracles.step_bound import step_bound as step_bound

DEGREES = (1, 2)


@dataclass(frozen=True, slots=True)
class Quality:
    """Over `cases` in which a plan exists: the largest part by which the search's plan is slower than the best (0: it
    never is), in how many it is faster than any with equal replicas, and in how many its bound is above the best."""

    cases: int
    worst_gap: float
    faster: int
    wrong_bounds: int


def small_cases(count: int) -> Quality:
    """The search beside enumeration on `count` cases of fixed seeds."""
    gaps, faster, wrong, seed = [], 0, 0, 0
    while len(gaps) < count:
        draw = random.Random(seed)
        seed += 1
        spec, trains = random_vlm(draw)
        costs = cost_model(
            {"vision": draw.random() + 0.1, "language": draw.random() + 0.1}, call=draw.choice([0.0, 2.0])
        )
        tokens = {"vision": draw.randint(1, 9), "language": draw.randint(1, 9)}
        devices, batch = draw.choice([2, 3, 4, 6]), draw.choice([4, 12])

        def seconds(name, flags, upstream, costs=costs, tokens=tokens):
            by_degree = {tp: costs.layers[name][Degrees(tp)] for tp in DEGREES}
            held = type("Costs", (), {"layers": by_degree})
            return lambda tp, samples: layer_seconds(held, tp, tokens[name] * samples, 1, flags, upstream)

        best = best_step(
            seconds("vision", trains, False),
            seconds("language", spec.unit("language").trainable, any(trains)),
            DEGREES,
            devices,
            batch,
            (1, 2),
        )
        if best == float("inf"):
            continue
        found = find(spec, costs, tokens, devices, batch)
        off = found.seconds / best - 1.0
        gaps.append(max(off, 0.0) if off > 1e-9 else 0.0)
        faster += off < -1e-9
        wrong += found.lower_bound > min(found.seconds, best) * (1 + 1e-9)
    return Quality(len(gaps), max(gaps, default=0.0), faster, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    found = small_cases(parser.parse_args().cases)
    print(
        f"{found.cases} cases: the search's plan is at most {found.worst_gap:.2%} slower than the best of all plans; "
        f"in {found.faster} it is faster than any with equal replicas; {found.wrong_bounds} bounds above the best"
    )


if __name__ == "__main__":
    main()


def grouped_bound(work: NDArray[np.float64], count: int) -> float:
    """The least that the largest of `count` groups can be in either unit, as a multiple of the larger of that unit's
    mean group and largest sample; `work` is [samples, 2] seconds.

    A group with a sample that is large in one unit has little room there for others, and so for their work in the other
    unit, however well they suit it (as in a fractional knapsack); that work must be in the remaining groups.
    """
    share = work / np.maximum(work.sum(axis=0) / count, work.max(axis=0))

    def may_be(limit: float) -> bool:
        for own, other in (share.T, share.T[::-1]):
            order = np.argsort(-other / np.maximum(own, 1e-12))
            sums = [np.append(0.0, np.cumsum(column[order])) for column in (own, other)]
            large = np.flatnonzero(own > limit / 2)  # no two of which are in one group
            beside = np.minimum(limit, other[large] + np.interp(limit - own[large], *sums))
            if beside.sum() + (count - len(large)) * limit < other.sum():
                return False
        return True

    low, high = 1.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if may_be(middle) else (middle, high)
    return low
