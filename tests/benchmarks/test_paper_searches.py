"""Searches of published systems: each gives plans of its own kind, and ours is no slower."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.papers.entrain.algorithm_2 import trial_batch
from benchmarks.papers.searches import Mode, candidates_of
from cases.model_cases import cluster, cost_model, model, unit
from cases.planning.drawn_searches import ROUNDING, drawn
from cases.search_cases import RULES, find
from dilatant.plan import PlanError, SearchProblem, SearchSettings, Workload
from dilatant.plan.validate import validate

VLM = model(unit("vision", 4, ("language",)), unit("language", 8))
COSTS = cost_model({"vision": 1.0, "language": 1.0})
TOKENS = {"vision": 4, "language": 8}


def searched(mode, spec, costs, tokens, devices, batch, **asked):
    workload = Workload({name: np.full(batch, float(count)) for name, count in tokens.items()})
    settings = SearchSettings((1, 2))
    problem = SearchProblem(spec, costs, cluster(1, devices), workload, batch, RULES, settings)
    return find(spec, costs, tokens, devices, batch, candidates_of(mode, problem), **asked)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_gives_a_valid_plan_of_its_own_kind(mode):
    found = searched(mode, VLM, COSTS, TOKENS, 12, 24)
    plan = found.winner.plan
    validate(plan, VLM, cluster(1, 12))
    replicas = {one.name: len(one.replicas) for one in plan.units}
    ranks = [
        {rank for replica in plan.unit(name).replicas for stage in replica.stages for rank in stage.ranks}
        for name in ("vision", "language")
    ]
    if mode is not Mode.DISTTRAIN:
        assert found.winner.idle_devices == 0
        assert replicas["vision"] == replicas["language"]
        assert not ranks[0] & ranks[1]
    if mode is Mode.MEGATRON:
        assert all(len(replica.stages) == 1 for replica in plan.unit("vision").replicas)
        assert plan.unit("vision").replicas[0].stages[0].tp == plan.unit("language").replicas[0].stages[0].tp
    assert find(VLM, COSTS, TOKENS, 12, 24).seconds <= found.seconds * ROUNDING


def seconds_of_both(mode, seed):
    """Seconds of our plan and of theirs; None where they find none."""
    draw = random.Random(seed)
    spec, costs, tokens = drawn(draw)
    devices, batch = draw.randint(3, 9), draw.choice([4, 12])
    try:
        theirs = searched(mode, spec, costs, tokens, devices, batch)
    except PlanError:
        return None
    return find(spec, costs, tokens, devices, batch).seconds, theirs.seconds


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(Mode))
def test_our_search_is_no_slower_than_a_published_one(mode):
    found = [seconds for seed in range(60) if (seconds := seconds_of_both(mode, seed)) is not None]
    assert len(found) > 10
    for ours, theirs in found:
        assert ours <= theirs * ROUNDING


def test_numbers_of_replicas_that_do_not_divide_each_other_are_searched():
    """DistTrain's optimum has two encoders for three language models on five devices."""
    ours, theirs = seconds_of_both(Mode.DISTTRAIN, 2)
    assert ours <= theirs * ROUNDING


def test_trials_double_until_all_agree_and_report_what_they_saw():
    draw = np.random.default_rng(0)
    work = draw.lognormal(6.0, 0.8, (20_000, 2))
    allocations = [(k, 16 - k) for k in range(2, 16, 2)]
    batch, seen = trial_batch(work, allocations, seed=4)
    sizes = list(seen)
    assert sizes == [2**k for k in range(len(sizes))]
    assert batch == sizes[-1]
    assert all(len(seen[size]) >= 2 for size in sizes[:-1])
    assert len(seen[batch]) == 1
