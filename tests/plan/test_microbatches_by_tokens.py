"""Plans whose microbatches are cut by tokens: their bounds hold, any number of pipelines can share a batch, and no
microbatch exceeds the limit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import cluster, cost_model, model, unit
from cases.search_cases import RULES, open_space, search
from dilatant.cost.dense import DenseRows
from dilatant.cost.quadratic import Quadratic
from dilatant.plan import Workload
from dilatant.plan.search.enumeration import enumerate_candidates
from dilatant.plan.search.finals import Finals
from dilatant.plan.search.why_not import parse_asked_layout, why_not
from dilatant.schedule.plan_scorer import PlanSimulator

ROUNDING = 1 + 1e-9


def dense_rows(draw):
    """Draw the cost factors of rows of several samples at some row lengths; they do not fall with the length."""
    tokens = sorted(draw.sample(range(2, 60), draw.randint(1, 4)))
    times = sorted(draw.choice([0.5, 1.0, 1.0, 2.0, 1.0 + draw.random()]) for _ in tokens)
    return DenseRows(tuple(map(float, tokens)), tuple(times))


def case(draw):
    """Draw a small vision-language model, costs with square and fixed parts, and samples, some in dense rows."""
    spec = model(unit("vision", draw.randint(1, 2), ("language",)), unit("language", draw.randint(1, 3)))
    costs = cost_model({"vision": draw.random() + 0.1, "language": draw.random() + 0.1}, call=draw.choice([0.0, 2.0]))
    curved = {
        kind: {
            degree: replace(cost, forward=Quadratic(0.1 * draw.random(), cost.forward.b, cost.forward.c))
            for degree, cost in own.items()
        }
        for kind, own in costs.layers.items()
    }
    batch = draw.randint(3, 9)
    tokens = {
        name: np.array([float(draw.randint(least, 12)) for _ in range(2 * batch)])
        for name, least in (("vision", 0), ("language", 1))
    }
    dense = {"language": dense_rows(draw)} if draw.random() < 0.5 else {}
    return spec, replace(costs, layers=curved), Workload(tokens, {}, dense), batch


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_beats_the_bound_of_its_candidate(seed):
    draw = random.Random(seed)
    spec, costs, workload, batch = case(draw)
    machine, budget = cluster(1, draw.randint(2, 4)), draw.randint(3, 40)
    space = open_space(spec, costs, machine, workload, batch, RULES, row_tokens=(budget,), microbatch_sizes=(1, 2))
    candidates = enumerate_candidates(space)
    finals = Finals(space, PlanSimulator(spec, costs, machine, workload, batch, rules=RULES))
    by_tokens = [one for one in candidates if one.row_tokens is not None]
    for one in by_tokens:
        finals.simulate(one)
        assert finals.seconds[one] >= one.bound / ROUNDING


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_beats_its_candidate_bound_under_a_row_limit(seed):
    """A row limit also cuts microbatches of a fixed number of samples, and dense rows then cost less."""
    draw = random.Random(seed)
    spec, costs, workload, batch = case(draw)
    workload = replace(workload, dense={"language": dense_rows(draw)})
    machine, limit = cluster(1, draw.randint(1, 3)), draw.randint(3, 40)
    scorer = PlanSimulator(spec, costs, machine, workload, batch, rules=RULES, row_tokens=limit)
    space = open_space(spec, costs, machine, workload, batch, RULES, row_limit=limit, microbatch_sizes=(1, 2, 3))
    finals = Finals(space, scorer)
    for one in enumerate_candidates(space):
        finals.simulate(one)
        assert finals.seconds[one] >= one.bound / ROUNDING


def test_bound_holds_where_dense_rows_cost_less_than_samples():
    """Two dense rows at half of (9 + 1) squared cost less than the squares of all samples: short samples fill them."""
    spec, costs = model(unit("language", 1)), cost_model({"language": 1e-9}, square=1.0)
    workload = Workload({"language": np.array([9.0, 1.0, 9.0, 1.0])}, {}, {"language": DenseRows.always(0.5)})
    machine = cluster(1, 1)
    scorer = PlanSimulator(spec, costs, machine, workload, 4, rules=RULES, row_tokens=10)
    space = open_space(spec, costs, machine, workload, 4, RULES, row_limit=10, microbatch_sizes=(4,))
    one = enumerate_candidates(space)[0]
    finals = Finals(space, scorer)
    finals.simulate(one)
    assert finals.seconds[one] >= one.bound / ROUNDING


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_search_that_also_cuts_by_tokens_is_no_slower(seed):
    draw = random.Random(seed)
    spec, costs, workload, batch = case(draw)
    machine, budget = cluster(1, draw.randint(2, 4)), draw.randint(3, 40)
    known = (spec, costs, machine, workload, batch, PlanSimulator(spec, costs, machine, workload, batch, rules=RULES))
    narrow, wide = (search(*known, (1, 2), RULES, 10_000, row_tokens=tokens) for tokens in ((), (budget,)))
    assert wide.seconds <= narrow.seconds * ROUNDING


def test_three_devices_share_a_batch_not_divisible_by_three():
    spec, costs = model(unit("language", 1)), cost_model({"language": 1.0})
    workload, machine = Workload({"language": np.full(8, 5.0)}), cluster(1, 3)
    scorer = PlanSimulator(spec, costs, machine, workload, 8, rules=RULES)
    known = spec, costs, machine, workload, 8, scorer, (1, 2), RULES, 10_000
    without, found = search(*known), search(*known, row_tokens=(15,))
    assert without.winner.idle_devices == 1
    winner = found.winner
    assert (winner.replicas, winner.idle_devices, winner.row_tokens) == (3, 0, 15)
    assert found.seconds < without.seconds
    for tokens, result, seconds in (((), without, None), ((15,), found, winner.score.seconds)):
        space = open_space(spec, costs, machine, workload, 8, RULES, row_tokens=tokens, microbatch_sizes=(1, 2))
        asked = parse_asked_layout("language: {replicas: 3}", ["language"])
        answer = why_not([space], machine, asked, result, scorer)
        if seconds is None:
            assert "does not divide among 3 replicas" in answer.impossible[0]
        else:
            assert answer.is_chosen
            assert answer.plans[0].score.seconds == seconds


def test_asked_for_a_budget_of_tokens_it_says_what_became_of_it():
    spec, costs = model(unit("language", 1)), cost_model({"language": 1.0}, call=1.0)
    workload, machine = Workload({"language": np.full(8, 5.0)}), cluster(1, 3)
    scorer = PlanSimulator(spec, costs, machine, workload, 8, rules=RULES)
    budgets = (10, 15)
    found = search(spec, costs, machine, workload, 8, scorer, (1, 2), RULES, 1, row_tokens=budgets)
    space = open_space(spec, costs, machine, workload, 8, RULES, row_tokens=budgets, microbatch_sizes=(1, 2))

    def ask(text):
        return why_not([space], machine, parse_asked_layout(text, ["language"]), found, scorer)

    assert found.winner.row_tokens == 15
    assert ask("microbatch_tokens: 15").is_chosen
    slower = ask("language: {replicas: 3}, microbatch_tokens: 10")
    assert not slower.is_chosen
    assert {one.row_tokens for one in slower.plans} == {10}
    assert slower.plans[0].score.seconds > found.seconds
    # 8 samples of 5 tokens on one replica: as many microbatches as by two samples each, which is tried instead.
    (alike,) = ask("language: {replicas: 1}, microbatch_tokens: 10").impossible
    assert "10 tokens are tried only where a step then has another number of microbatches" in alike
    (untried,) = ask("microbatch_tokens: 6").impossible
    assert untried == "microbatch_tokens 6 was not tried; 10 or 15 was (plan.microbatch_tokens)"


def test_bounds_count_on_no_number_of_dense_rows():
    """The second batch has more rows than the mean batch, and costs less than it would with as few rows."""
    spec, costs = model(unit("language", 1)), cost_model({"language": 1.0})
    square = Quadratic(a=1.0)
    curves = dict.fromkeys(("forward", "input_gradient", "weight_gradient", "first_trainable"), square)
    layers = {"language": {degree: replace(cost, **curves) for degree, cost in costs.layers["language"].items()}}
    costs, machine = replace(costs, layers=layers), cluster(1, 1)
    workload = Workload({"language": np.array([1.0] * 12 + [5.0] * 12)}, {}, {"language": DenseRows.always(0.4)})
    space = open_space(spec, costs, machine, workload, 12, RULES, row_tokens=(10,), microbatch_sizes=(1, 2))
    finals = Finals(space, PlanSimulator(spec, costs, machine, workload, 12, rules=RULES))
    (one,) = (each for each in enumerate_candidates(space) if each.row_tokens)
    assert one.num_microbatches == 4
    assert finals.simulate(one)
    assert finals.seconds[one] >= one.bound
