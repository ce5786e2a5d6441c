"""No plan of small cases is clearly faster than the search's: an enumeration of all cuts, degrees and replicas."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from cases.model_cases import cost_model
from cases.search_cases import RULES, random_vlm, search
from dilatant.plan import Cluster, Link, Plan, Workload
from dilatant.plan.errors import PlanError
from dilatant.plan.plan import Replica, Stage, UnitPlan
from dilatant.plan.search.finals import moved_cuts
from dilatant.schedule.plan_scorer import PlanSimulator

WIDTHS = (1, 2)
CLOSE = 0.01
"""The search may be this much slower: it begins with the cut where work is most even, and moves single layers."""


def chains(layers, stages, tp, first):
    """Every chain of `stages` stages on consecutive ranks."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        bounds = itertools.pairwise((0, *inner, layers))
        yield Replica(
            tuple(
                Stage(a, b, tuple(range(first + k * tp, first + (k + 1) * tp)), tp=tp)
                for k, (a, b) in enumerate(bounds)
            )
        )


def on(chain, offset):
    return chain.renamed({rank: rank + offset for stage in chain.stages for rank in stage.ranks})


def every_plan(vision, language, devices):
    """Every plan of equal pipelines on these devices or fewer; encoders have devices of their own, or run in the first
    stage of the language model."""
    for replicas in range(1, devices + 1):
        each = devices // replicas
        for tp, stages in itertools.product(WIDTHS, range(1, language + 1)):
            behind = tp * stages
            for width, depth in [(tp, 0), *itertools.product(WIDTHS, range(1, vision + 1))]:
                size = behind + width * depth
                if size > each:
                    continue
                ahead = list(chains(vision, max(depth, 1), width, 0))
                for before, own in itertools.product(ahead, list(chains(language, stages, tp, width * depth))):
                    both = [("vision", before, ("language",)), ("language", own, ())]
                    yield (
                        replicas,
                        Plan(
                            tuple(
                                UnitPlan(name, tuple(on(chain, r * size) for r in range(replicas)), feeds)
                                for name, chain, feeds in both
                            )
                        ),
                    )


def gap(seed):
    """How much slower the search's plan is than the best of all plans; None if no plan is possible."""
    draw = random.Random(seed)
    spec, _ = random_vlm(draw)
    seconds = {"vision": draw.random() + 0.1, "language": draw.random() + 0.1}
    costs = cost_model(seconds, overhead=draw.choice([0.1, 0.6]), output=2.0, call=draw.choice([0.0, 0.5]))
    batch, devices, alike = draw.choice([4, 8]), draw.choice([2, 3, 4]), draw.random() < 0.5
    counts = {name: [float(draw.randint(1, 9)) for _ in range(1 if alike else batch)] for name in seconds}
    link = Link(draw.choice([1e9, 30.0, 10.0]), 1e-6)
    cluster = Cluster(1, devices, float("inf"), link, link)
    workload = Workload({name: np.resize(own, batch) for name, own in counts.items()})
    scorer = PlanSimulator(spec, costs, cluster, workload, batch, rules=RULES)
    try:
        found = search(spec, costs, cluster, workload, batch, scorer, WIDTHS, RULES, 24, fills_idle=True)
    except PlanError:
        return None
    best = min(
        scorer(plan, batch // (replicas * size)).seconds
        for replicas, plan in every_plan(*(len(unit.layers) for unit in spec.units), devices)
        for size in WIDTHS
        if batch % (replicas * size) == 0
    )
    return found.seconds / best - 1.0


@pytest.mark.parametrize("cases", [range(130, 132), pytest.param(range(200), marks=pytest.mark.slow)], ids=len)
def test_no_cut_is_clearly_faster_than_the_searched(cases):
    gaps = {seed: gap(seed) for seed in cases}
    far = {seed: own for seed, own in gaps.items() if own is not None and own > 1e-9}
    print(f"{len(far)} of {len(gaps)} beaten: {far}")
    assert sum(own is not None for own in gaps.values()) >= 0.9 * len(gaps)
    assert all(own <= CLOSE for own in far.values()), far


def test_moved_cuts_stay_whole_chains():
    (chain,) = (one for one in chains(6, 3, 1, 0) if [stage.first for stage in one.stages] == [0, 1, 4])
    plan = Plan((UnitPlan("language", (chain, on(chain, 3))),))
    found = [[stage.first for stage in other.units[0].replicas[1].stages] for other in moved_cuts(plan)]
    assert found == [[0, 2, 4], [0, 1, 5], [0, 1, 3]]
    assert all(other.units[0].replicas[0].shape == other.units[0].replicas[1].shape for other in moved_cuts(plan))
