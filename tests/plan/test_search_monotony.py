"""What a search may not get wrong: more devices, more memory or a wider search never give a slower plan, and no plan
beats its bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from cases.model_cases import cluster
from cases.planning.drawn_searches import ROUNDING, check, drawn, often
from cases.search_cases import RULES, find, search
from dilatant.config.degrees import ONE
from dilatant.cost.dense import DenseRows
from dilatant.cost.layer import LayerCost
from dilatant.plan import DoesNotFitError, Workload
from dilatant.plan.costs.unit_layers import UnitLayers
from dilatant.plan.layouts.option_table import ChainRequest, OptionTable
from dilatant.plan.model_spec import ModelSpec
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.plan_scorer import CANDIDATE_FAMILIES, PlanSimulator


@often
def test_more_devices_never_give_a_slower_plan(cases):
    """Where all candidates are looked at; some of the time with few of them, which are simulated."""

    def one(seed):
        draw = random.Random(seed)
        few = draw.random() < 0.25
        spec, costs, tokens = drawn(draw, parameters=draw.choice([0, 400_000_000]) if few else 0)
        devices, batch = draw.randint(2, 7 if few else 9), draw.choice([4, 12])
        if few:
            unlike = {name: np.array([float(draw.randint(1, 9)) for _ in range(batch)]) for name in tokens}
            tokens = draw.choice([(), (draw.randint(4, 30),)])
            fewer, more = (simulated(spec, costs, unlike, count, tokens) for count in (devices, devices + 1))
        else:
            fewer, more = (find(spec, costs, tokens, count, batch) for count in (devices, devices + 1))
        assert more.seconds <= fewer.seconds * ROUNDING

    def simulated(spec, costs, tokens, devices, row_tokens):
        machine, workload = cluster(1, devices), Workload(tokens)
        scorer = PlanSimulator(spec, costs, machine, workload, workload.num_samples, rules=RULES)
        asked = workload, workload.num_samples, scorer, (1, 2), RULES
        return search(spec, costs, machine, *asked, finalists=6, row_tokens=row_tokens)

    check(cases, one)


def test_extra_device_keeps_three_language_models_best():
    """A closed form of the step prefers four language models on five devices, which are slower."""
    draw = random.Random(124856499)
    spec, costs, tokens = drawn(draw)
    found = [find(spec, costs, tokens, devices, 12) for devices in (4, 5)]
    assert found[1].seconds < found[0].seconds
    assert [[len(unit.replicas) for unit in one.winner.plan.units] for one in found] == [[1, 3], [2, 3]]


@often
def test_what_may_be_the_fastest_by_its_bound_is_simulated(cases):
    """With few finalists, too: on few devices plans are proven to be the fastest, as if all were finalists."""

    def one(seed):
        spec, costs, tokens = drawn(random.Random(seed))
        few, every = (find(spec, costs, tokens, 4, 4, finalists=most) for most in (1, 10_000))
        left = sum(group.left for group in few.groups)
        assert few.lower_bound <= every.seconds * ROUNDING
        assert left or few.proven
        if few.proven:
            assert few.seconds <= every.seconds * ROUNDING
            proven.append(seed)

    proven = []
    check(cases, one)
    assert len(proven) > 0.9 * cases


def of_sizes_of_memory(draw, activation, times):
    """Seconds on devices of some memory, and of so many times as much; None where the first is too small."""
    spec, costs, tokens = drawn(draw, parameters=40, free=draw.random() < 0.7, activation=activation)
    devices, batch = draw.choice([2, 3, 4]), draw.choice([4, 12])
    small = draw.uniform(60, 500)
    try:
        tight = find(spec, costs, tokens, devices, batch, machine=cluster(1, devices, small))
    except DoesNotFitError:
        return None
    assert max(tight.winner.score.peak_bytes) <= small
    large = cluster(1, devices, small * times(draw))
    return tight.seconds, find(spec, costs, tokens, devices, batch, machine=large).seconds


@often
def test_larger_memory_never_hurts(cases):
    def one(seed):
        draw = random.Random(seed)
        found = of_sizes_of_memory(draw, draw.choice([2.0, 6.0]), lambda draw: draw.uniform(1.0, 2.0))
        assert found is None or found[1] <= found[0] * ROUNDING

    check(cases, one)


def test_a_plan_that_overflows_in_simulation_recomputes_no_more_than_it_must():
    """With all layers raised by a level it would be slower than the plan with less memory."""
    tight, large = of_sizes_of_memory(random.Random(394441), 2.0, lambda draw: draw.uniform(1.0, 2.0))
    assert large < 0.95 * tight


def recomputation_left_open(seed):
    """Seconds of a plan that may choose what is recomputed, and of one for which that is prescribed; None where the
    latter does not fit."""
    draw = random.Random(seed)
    free, costs, tokens = drawn(draw, parameters=40, free=True)
    how = draw.choice(["none", "block", "block_keep_attention"])
    fixed = ModelSpec(tuple(replace(unit, recompute=how) for unit in free.units))
    devices, batch = draw.choice([2, 3, 4]), draw.choice([4, 12])
    machine = cluster(1, devices, draw.uniform(60, 500))
    try:
        prescribed = find(fixed, costs, tokens, devices, batch, machine=machine)
    except DoesNotFitError:
        return None
    return find(free, costs, tokens, devices, batch, machine=machine).seconds, prescribed.seconds


@often
def test_free_recomputation_is_no_slower_than_any_fixed_choice(cases):
    def one(seed):
        seconds = recomputation_left_open(seed)
        assert seconds is None or seconds[0] <= seconds[1] * ROUNDING

    check(cases, one)


def test_units_with_replicas_of_their_own_may_recompute_too():
    """One encoder for two language models fits only if it recomputes, in microbatches of as many samples."""
    free, prescribed = recomputation_left_open(3278646)
    assert free < 0.9 * prescribed


def test_a_chain_that_recomputes_only_some_layers_still_fits():
    mixed = 0
    for seed in range(300):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw, parameters=4000, free=True, activation=200.0)
        workload = Workload({name: np.full(8, float(count)) for name, count in tokens.items()})
        units = UnitLayers(spec, costs, workload, 4, RULES, 8)
        options = OptionTable(units, draw.uniform(3_000, 50_000))
        behind = draw.randint(0, 2)
        chain = options.chain(ChainRequest("language", ONE, draw.randint(1, 4), 1.0, 8), behind)
        if chain is not None:
            assert chain.headroom >= behind
            mixed += len(set(chain.chain.recompute.get("language", ()))) > 1
    assert mixed > 5


def test_chains_compared_within_memory_are_as_fast_as_when_they_are_laid_out():
    forbidden = recomputing = 0
    for seed in range(300):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw, parameters=4000, free=draw.random() < 0.8, activation=200.0)
        workload = Workload({name: np.full(8, float(count)) for name, count in tokens.items()})
        rules = replace(RULES, host_link=draw.choice([0.0, 1e5]))
        options = OptionTable(UnitLayers(spec, costs, workload, 4, rules, 8), draw.uniform(3_000, 50_000))
        known, behind, microbatches = options.fastest_chains("language", 1.0, 8), draw.randint(0, 2), draw.randint(1, 8)
        rows = np.array(sorted(draw.sample(range(len(known.gpus)), min(len(known.gpus), 6))))
        found = options.in_memory(known, rows, microbatches, behind)
        for row, seconds in zip(rows.tolist(), found.T):
            chain = options.chain(known.request(row, microbatches), behind)
            expected = (math.inf, math.inf) if chain is None else (chain.slowest, chain.total)
            assert seconds == pytest.approx(expected, rel=1e-9)  # sums of seconds in another order
            forbidden += chain is None
            recomputing += chain is not None and chain.chain.recompute.get("language", ("none",))[0] != "none"
    assert min(forbidden, recomputing) > 20


def test_chains_that_fit_only_with_inputs_on_the_host_have_them_there():
    more = 0
    for seed in range(100):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw, free=True, activation=200.0)
        workload = Workload({name: np.full(8, float(count)) for name, count in tokens.items()})
        request, capacity = ChainRequest("language", ONE, draw.randint(1, 4), 1.0, 8), draw.uniform(500, 5_000)
        alone, beside = (
            OptionTable(UnitLayers(spec, costs, workload, 4, replace(RULES, host_link=link), 8), capacity).chain(
                request, 1
            )
            for link in (0.0, 1e30)
        )
        if alone is not None:
            assert beside is not None
            assert beside.total <= alone.total * ROUNDING
        elif beside is not None:
            assert "block_offload" in beside.chain.recompute["language"]
            more += 1
    assert more > 2


@pytest.mark.slow
@often
def test_no_simulated_plan_beats_the_bound_of_a_stopped_search(cases):
    """Dense rows, which cost less the more even they are, unlike samples, backwards in halves, and gradients."""

    def one(seed):
        draw = random.Random(seed)
        spec, costs, _ = drawn(draw, parameters=draw.choice([0, 400_000_000]))
        costs = replace(
            costs, layers={kind: {d: _squared(c, draw) for d, c in by.items()} for kind, by in costs.layers.items()}
        )
        devices, batch = draw.choice([2, 3, 4]), draw.choice([4, 8])
        tokens = {name: np.array([float(draw.randint(1, 9)) for _ in range(batch)]) for name in ("vision", "language")}
        by_length = DenseRows((4.0, 12.0, 30.0), (1.0, draw.choice([1.0, 1.4]), 2.0))
        dense = {"language": draw.choice([DenseRows.always(1.0), DenseRows.always(2.0), by_length])}
        workload = Workload(tokens, {}, dense if draw.random() < 0.7 else {})
        machine = cluster(draw.choice([1, 2]), devices)
        names = draw.choice([CANDIDATE_FAMILIES, ("1f1b",), ("zb-h1",), ("zb-h2",)])
        families, halves = {name: FAMILIES[name] for name in names}, names != ("1f1b",)
        rules = replace(RULES, zero=draw.choice(["none", "node", "all"]), ranks_per_node=devices)
        scorer = PlanSimulator(spec, costs, machine, workload, batch, rules=rules, families=families)
        row_tokens = draw.choice([(), (draw.randint(4, 30),)])

        def found(finalists):
            asked = (1, 2), rules, finalists
            known = spec, costs, machine, workload, batch, scorer
            return search(*known, *asked, splits_backward=halves, row_tokens=row_tokens)

        early, every = found(1), found(10_000)
        assert early.lower_bound <= every.seconds * ROUNDING
        if early.proven:
            assert early.seconds <= every.seconds * ROUNDING

    check(cases, one)


def _squared(cost: LayerCost, draw) -> LayerCost:
    curve = structs.replace(cost.forward, a=0.1 * draw.random())
    return replace(cost, forward=curve, input_gradient=curve, weight_gradient=curve, first_trainable=curve)
