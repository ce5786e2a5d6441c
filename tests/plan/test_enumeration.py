"""A search leaves out only plans that are certainly slower than the best."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cases.model_cases import cost_model, model, unit
from cases.search_cases import RULES, open_space, random_vlm, search
from dilatant.plan import Link, PlanScore, Workload
from dilatant.plan.cluster import Cluster
from dilatant.plan.limits import NEAR, SLOW
from dilatant.plan.search.closed_form import Work, unchunked_seconds
from dilatant.plan.search.enumeration import enumerate_candidates
from dilatant.plan.search.pairing import least_step
from dilatant.plan.search.separate_units import (
    JointLayout,
    SeparateUnits,
    UnitLayout,
    joined,
    separate_replica_candidates,
)

ROUNDING = 1 + 1e-9


def a_space(draw, spec=None):
    spec = spec or random_vlm(draw)[0]
    seconds = {unit.name: draw.choice([0.2, 1.0, 3.0]) for unit in spec.units}
    costs = cost_model(seconds, ((1, 1), (2, 1), (1, 2)), output=0.0, call=draw.choice([0.0, 0.5]))
    curved = {
        kind: {
            degree: replace(cost, forward=structs.replace(cost.forward, a=0.1 * draw.random()))
            for degree, cost in own.items()
        }
        for kind, own in costs.layers.items()
    }
    batch = draw.choice([4, 6, 12])
    tokens = {
        unit.name: np.array([float(draw.randint(0, 12)) for _ in range(batch)]) + (unit.name == "language")
        for unit in spec.units
    }
    memory = draw.choice([float("inf"), draw.uniform(50, 400)])
    cluster = Cluster(draw.randint(1, 2), draw.randint(2, 6), memory, Link(1e9, 1e-6), Link(1e8, 1e-5))
    halves = draw.random() < 0.5
    return lambda: open_space(
        spec, replace(costs, layers=curved), cluster, Workload(tokens), batch, RULES,
        microbatch_sizes=(1, 2), chunks=(1, 2), splits_backward=halves, row_tokens=(30,),
    )  # fmt: skip


def shape(one):
    """Return the values that identify a candidate."""
    chains = ((o.chain, o.headroom) for o in one.options)
    return (
        one.encoders_at, one.replicas, one.num_microbatches, one.row_tokens, one.counts, one.estimate, one.bound,
        tuple((c.degrees, *c.others.values(), c.chunks, room, *sorted(c.cuts.items())) for c, room in chains),
    )  # fmt: skip


@pytest.mark.parametrize("cases", [8, pytest.param(500, marks=pytest.mark.slow)], ids=["few", "many"])
def test_only_candidates_bounded_above_the_limit_are_skipped(cases):
    @settings(max_examples=cases, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.floats(1.0, 4.0))
    def check(seed, far):
        space = a_space(random.Random(seed))
        every = enumerate_candidates(space())
        if not every:
            return
        once = [shape(one) for one in every]
        assert len(once) == len(set(once))
        best = min(one.estimate for one in every if len(set(one.counts)) == 1)
        limit = far * best
        spaces = space(), space()
        kept = enumerate_candidates(spaces[0], most_times=far)
        below = enumerate_candidates(spaces[1], most_seconds=limit)
        known = {shape(one) for one in every}
        own = [one for one in kept if len(set(one.counts)) > 1]
        assert all(one.estimate <= NEAR * best for one in own)
        for found, omitted in ((kept, spaces[0].omitted), (below, spaces[1].omitted)):
            shapes = {shape(one) for one in found}
            # Beside one that is left out others, dominated by it, may stay: they are as slow.
            assert all(shape(one) in known or one.estimate * ROUNDING >= limit for one in found)
            alike = [one for one in every if len(set(one.counts)) == 1]  # others must promise less still
            for one in alike:
                better = [
                    two
                    for two in found
                    if (two.replicas, two.num_microbatches, two.row_tokens)
                    == (one.replicas, one.num_microbatches, one.row_tokens)
                    and two.gpus <= one.gpus
                    and two.estimate <= one.estimate * ROUNDING
                ]
                # Chains that another beats in closed form may sync faster; far from the best that is not tried.
                assert shape(one) in shapes or one.estimate * ROUNDING >= min(limit, NEAR * best) or better
                assert shape(one) in shapes or one.bound * ROUNDING >= omitted

    check()


def test_separate_replicas_are_found_where_the_language_model_alone_is_fast_enough():
    """Pipelines and microbatches at which the language model alone takes too long are left out: without that, the same
    candidates are found."""
    spec = model(
        *(unit(name, 2, ("language",), kind=name) for name in ("vision", "audio")),
        unit("language", 3, ("image",)),
        unit("image", 1),
    )
    found_some = False
    for seed in range(10):
        space, far = a_space(random.Random(seed), spec), (0.9, 1.2, 2.0)[seed % 3]
        most = far * min((one.estimate for one in enumerate_candidates(space(), most_times=1.0)), default=1.0)
        every = [
            one
            for count in (1, 2, 3)
            for chosen in itertools.combinations(("vision", "audio", "image"), count)
            for one in SeparateUnits([space()], 0, dict.fromkeys(chosen, 0), most).candidates()
        ]
        found = [*separate_replica_candidates(space(), most)]
        assert Counter(map(shape, found)) == Counter(map(shape, every))
        found_some |= bool(found)
    assert found_some


@pytest.mark.slow
def test_ways_to_run_units_are_left_out_only_beside_better_ones():
    """The result of `joined` equals a comparison of every combination with all others."""
    for seed in range(12):
        draw = np.random.default_rng(seed)
        last, encoder = bool(draw.integers(2)), bool(draw.integers(2))
        times = SimpleNamespace(exposed_sync=0.0)
        own = [
            UnitLayout(SimpleNamespace(gpus=gpus, slowest=slowest, total=slowest + more), 1, times, 1.0)
            for gpus, slowest, more in draw.integers(1, 9, (60, 3))
        ]
        few = [
            JointLayout((), (), *(draw.integers(1, 9, 3) / 4), 0.0, tuple(draw.integers(4, 9, 2))) for _ in range(40)
        ]
        every = [row.beside(way, 1, encoder) for row in few for way in own if way.devices <= row.left[1]]
        kept = joined(few, own, 1, encoder, True, last)

        def worth(row, last=last):
            return np.array([row.slowest, row.before, row.after, *(() if last else (-free for free in row.left))])

        found = {tuple(worth(row)) for row in kept}
        best = {
            tuple(worth(row))
            for row in every
            if not any((worth(o) <= worth(row)).all() and (worth(o) < worth(row)).any() for o in every)
        }
        assert found == best
        assert len(kept) == len(found)


def test_slow_plans_are_searched_where_no_other_fits():
    """On many devices, plans that leave most of them idle are searched despite estimates far above the best."""
    spec, _ = random_vlm(random.Random(0))
    costs = cost_model({"vision": 1.0, "language": 3.0}, output=0.0)
    workload = Workload({"vision": np.full(160, 4.0), "language": np.full(160, 8.0)})
    cluster = Cluster(20, 8, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5))
    asked = []

    def scorer(plan, microbatches, row_tokens=None, *_):
        asked.append(len(plan.ranks))
        fits = len(plan.ranks) < 20
        return PlanScore(1.0, 1.0, 0.0, {}, (0.0 if fits else 1e9,) * len(plan.ranks))

    found = search(spec, costs, cluster, workload, 160, scorer, rules=RULES)
    assert len(found.winner.plan.ranks) < 20 < max(asked)
    assert found.candidates >= len(enumerate_candidates(open_space(spec, costs, cluster, workload, 160, RULES)))


def test_units_that_find_no_devices_beside_each_other_have_no_candidates():
    """Three of seven devices are left beside two language models, where each of three encoders needs two."""
    names = ("vision", "audio", "depth")
    encoders = [unit(name, 2, ("language",), kind="vision") for name in names]
    spec = model(*encoders, unit("language", 2))
    costs = cost_model({"vision": 1.0, "language": 3.0}, ((2, 1),), output=0.0)
    workload = Workload({name: np.full(4, 8.0) for name in (*names, "language")})
    found = enumerate_candidates(
        open_space(spec, costs, Cluster(1, 7, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5)), workload, 4, RULES)
    )
    assert found
    assert all(one.gpus <= 7 and all(own % 2 == 0 for own in (o.gpus for o in one.options)) for one in found)


def test_skipped_candidates_do_not_enter_the_proven_bound():
    """If the best plan is slower than the limit above which candidates are skipped, skipped ones may be faster."""
    spec, _ = random_vlm(random.Random(0))
    costs = cost_model({"vision": 1.0, "language": 3.0}, output=0.0)
    workload = Workload({"vision": np.full(160, 4.0), "language": np.full(160, 8.0)})
    cluster = Cluster(20, 8, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5))

    def scorer(plan, *_):
        return PlanScore(1e6, 1.0, 0.0, {}, (0.0,) * len(plan.ranks))

    found = search(spec, costs, cluster, workload, 160, scorer, rules=RULES)
    every = enumerate_candidates(open_space(spec, costs, cluster, workload, 160, RULES))
    assert found.candidates < len(every)
    assert found.lower_bound <= SLOW * every[0].estimate
    assert not found.proven


@pytest.mark.parametrize("seconds", [1e-6, 1e6])
def test_few_devices_are_searched_whole_if_steps_are_slow(seconds):
    """If the best plan is slower than the limit above which candidates are skipped, skipped ones may be faster."""
    spec, _ = random_vlm(random.Random(0))
    costs = cost_model({"vision": 1.0, "language": 3.0}, output=0.0)
    workload = Workload({"vision": np.full(160, 4.0), "language": np.full(160, 8.0)})
    cluster = Cluster(5, 8, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5))

    def scorer(plan, *_):
        return PlanScore(seconds, 1.0, 0.0, {}, (0.0,) * len(plan.ranks))

    found = search(spec, costs, cluster, workload, 160, scorer, rules=RULES)
    every = enumerate_candidates(open_space(spec, costs, cluster, workload, 160, RULES))
    assert (found.candidates >= len(every)) == (seconds > 1.0)


def test_a_limit_of_nothing_leaves_nothing_out():
    """For a model without costs, every estimate is 0, and so is the limit, a multiple of the best estimate."""
    spec, _ = random_vlm(random.Random(0))
    costs = cost_model({"vision": 0.0, "language": 0.0}, output=0.0)
    workload = Workload({"vision": np.full(160, 4.0), "language": np.full(160, 8.0)})
    cluster = Cluster(20, 8, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5))
    space = open_space(spec, costs, cluster, workload, 160, RULES)
    every, within = (enumerate_candidates(space, most_times=times) for times in (float("inf"), SLOW))
    assert len(within) == len(every) > 0


def test_the_fullest_replica_sharing_a_microbatch_counts():
    """Of samples of 6, 1, 1 and 4 tokens in pairs, the fuller parts are 6 and 4: 10 of 12, where even parts have 6."""
    spec, _ = random_vlm(random.Random(0))
    costs = cost_model({"vision": 1.0, "language": 1.0}, output=0.0)
    workload = Workload({"vision": np.array([6.0, 1.0, 1.0, 4.0]), "language": np.full(4, 3.0)})
    space = open_space(spec, costs, Cluster(1, 4, 1e6, Link(1e9, 1e-6), Link(1e8, 1e-5)), workload, 4, RULES)
    assert space.fullest_part("vision", 2, 2) == pytest.approx(10 / 6)
    assert space.fullest_part("vision", 4, 2) == pytest.approx(1.0)
    assert space.fullest_part("language", 2, 2) == pytest.approx(1.0)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("heaviest", [1.0, 1.5, 4.0])
def test_the_least_step_is_that_of_any_slowest_stage(splits, heaviest):
    """Compared with a fine grid of slowest stages, whose steps are 1/2,000 of `fill` apart."""
    space = SimpleNamespace(heaviest=lambda count: heaviest, settings=SimpleNamespace(splits_backward=splits))
    draw = np.random.default_rng(0)
    for _ in range(200):
        fill, share, late = draw.uniform(1.0, 5.0), draw.uniform(0.2, 0.5), draw.uniform(0.1, 0.5)
        slowest, microbatches = fill * draw.uniform(0.05, 1.0), int(draw.integers(1, 9))
        work = Work(share * fill, fill, 2.0, 2.0 * (1.0 - late))
        every = [
            unchunked_seconds(space, 2, microbatches, fill, float(one), work)
            for one in np.linspace(slowest, fill, 2000)
        ]
        (least,) = least_step(space, 2, microbatches, np.array([fill]), np.array([slowest]), work)
        assert min(every) - 1e-3 * heaviest * microbatches * fill <= least <= min(every) * ROUNDING
