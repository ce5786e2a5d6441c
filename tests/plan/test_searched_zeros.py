"""The search over ZeRO modes finds the best of all modes, and its claims hold for all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import cluster, cost_model, model, unit, vlm_of
from cases.planning.drawn_searches import ROUNDING, check, drawn, often
from cases.search_cases import RULES, find, search
from dilatant.config.degrees import Degrees
from dilatant.cost.memory import ParameterBytes
from dilatant.plan import DoesNotFitError, Workload
from dilatant.schedule.plan_scorer import PlanSimulator
from oracles.search import best_step, layer_seconds

EVERY = ("node", "none", "all")


def dear(draw):
    """Draw, in random order, ZeRO mode → factor of the step time under it."""
    return {zero: draw.choice([1.0, 1.0, 1.0 + draw.random() / 4]) for zero in draw.sample(EVERY, 3)}


def sharers(zero, nodes, replicas):
    """Return the number of replicas that shard state together, if all devices are on one node or each on its own."""
    return replicas if zero == "all" or (zero == "node" and nodes == 1) else 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_is_faster_whoever_shares_state(seed):
    draw = random.Random(seed)
    sizes = {"vision": draw.randint(1, 3), "language": draw.randint(2, 4)}
    parameters = {name: [draw.randint(0, 40) for _ in range(count)] for name, count in sizes.items()}
    spec = vlm_of(parameters)
    devices, batch, capacity = draw.choice([2, 3, 4]), draw.choice([4, 12]), draw.uniform(60, 500)
    nodes = draw.choice([1, devices])
    degrees = (1, 2) if nodes == 1 else (1,)
    costs = cost_model(
        {name: draw.random() + 0.1 for name in sizes}, tuple((tp, 1) for tp in degrees), activation=2.0, output=0.0
    )
    tokens = {"vision": draw.randint(1, 9), "language": draw.randint(1, 9)}
    zeros = dear(draw)

    def seconds(name, upstream):
        layers = type("Costs", (), {"layers": {tp: costs.layers[name][Degrees(tp)] for tp in degrees}})
        flags = [True] * sizes[name]
        return lambda tp, samples: layer_seconds(layers, tp, tokens[name] * samples, 1, flags, upstream)

    def fits_of(zero):
        def of(replicas):
            each = 2.0 + 2.0 / sharers(zero, nodes, replicas)

            def fits(*stages):
                held = 0.0
                for name, tp, samples, first, end, in_flight in stages:
                    held += each * sum(parameters[name][first:end]) / tp
                    held += in_flight * (end - first) * 2.0 * tokens[name] * samples / tp
                return held <= capacity

            return fits

        return of

    asked = seconds("vision", False), seconds("language", True), degrees, devices, batch, (1, 2)
    expected = min(times * best_step(*asked, fits_of=fits_of(zero)) for zero, times in zeros.items())
    machine = cluster(nodes, devices // nodes, capacity)
    rules = replace(RULES, ranks_per_node=devices // nodes)
    try:
        found = find(spec, costs, tokens, devices, batch, machine=machine, rules=rules, zeros=zeros)
    except DoesNotFitError:
        assert expected == float("inf")
        return
    assert max(found.winner.score.peak_bytes) <= capacity
    assert found.seconds <= expected * ROUNDING
    if all(len(one.replicas) == found.winner.replicas for one in found.winner.plan.units):
        assert found.winner.idle_devices or found.seconds == pytest.approx(expected)


@often
def test_search_over_sharding_beats_or_equals_each_mode_alone(cases):
    def one(seed):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw, parameters=40, free=draw.random() < 0.7)
        nodes, per_node, batch = *draw.choice([(1, 3), (1, 4), (2, 2), (4, 1)]), draw.choice([4, 12])
        machine = cluster(nodes, per_node, draw.uniform(60, 500))
        how = {"machine": machine, "rules": replace(RULES, ranks_per_node=per_node)}
        case, zeros = (spec, costs, tokens, nodes * per_node, batch), dear(draw)
        for finalists in (1, 10_000):
            alone = {}
            for zero, times in zeros.items():
                try:
                    alone[zero] = find(*case, finalists=finalists, zeros={zero: times}, **how).seconds
                except DoesNotFitError:
                    continue
            if not alone:
                with pytest.raises(DoesNotFitError):
                    find(*case, finalists=finalists, zeros=zeros, **how)
                return
            found = find(*case, finalists=finalists, zeros=zeros, **how)
            assert found.seconds <= min(alone.values()) * ROUNDING
            assert found.by_zero[found.winner.zero] == found.seconds
            assert found.by_zero.keys() == zeros.keys()
            assert found.lower_bound <= found.seconds
            if found.proven:
                least = {zero: find(*case, zeros={zero: zeros[zero]}, **how).seconds for zero in alone}
                assert found.seconds <= min(least.values()) * ROUNDING

    check(cases, one)


@pytest.mark.slow
@often
def test_more_memory_never_hurts(cases):
    def one(seed):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw, parameters=40, free=draw.random() < 0.7)
        nodes, per_node = draw.choice([(1, 3), (2, 2), (4, 1)])
        small, zeros = draw.uniform(60, 500), dear(draw)
        how = {"rules": replace(RULES, ranks_per_node=per_node), "zeros": zeros}
        case = spec, costs, tokens, nodes * per_node, draw.choice([4, 12])
        try:
            tight = find(*case, machine=cluster(nodes, per_node, small), **how)
        except DoesNotFitError:
            return
        large = cluster(nodes, per_node, small * draw.uniform(1.0, 2.0))
        assert find(*case, machine=large, **how).seconds <= tight.seconds * ROUNDING

    check(cases, one)


@pytest.mark.slow
@often
def test_more_devices_never_hurt(cases):
    def one(seed):
        draw = random.Random(seed)
        spec, costs, tokens = drawn(draw)
        devices, batch, zeros = draw.randint(2, 9), draw.choice([4, 12]), dear(draw)
        fewer, more = (find(spec, costs, tokens, count, batch, zeros=zeros).seconds for count in (devices, devices + 1))
        assert more <= fewer * ROUNDING

    check(cases, one)


@pytest.mark.slow
@often
def test_no_simulated_plan_beats_the_bound_whoever_shares_state(cases):
    """Simulated with gradients that are summed, and with memory that holds only some plans."""

    def one(seed):
        draw = random.Random(seed)
        spec, costs, _ = drawn(draw, parameters=draw.choice([0, 400_000_000]), free=draw.random() < 0.5)
        per_node, batch = draw.choice([1, 2]), draw.choice([4, 8])
        tokens = {name: np.array([float(draw.randint(1, 9)) for _ in range(batch)]) for name in ("vision", "language")}
        workload, machine = Workload(tokens), cluster(2, per_node, draw.choice([1e9, 3e9, float("inf")]))
        zeros = draw.sample(EVERY, 3)

        def found(finalists, zeros):
            first, *others = [replace(RULES, zero=zero, ranks_per_node=per_node) for zero in zeros]
            known = spec, costs, machine, workload, batch
            scorers = {own.zero: PlanSimulator(*known, rules=own) for own in (first, *others)}
            return search(*known, scorers.pop(first.zero), (1, 2), first, finalists, others=scorers)

        try:
            early = found(1, zeros)
        except DoesNotFitError:
            return
        for zero in zeros:
            try:
                every = found(10_000, [zero])
            except DoesNotFitError:
                continue
            assert early.lower_bound <= every.seconds * ROUNDING
            if early.proven:
                assert early.seconds <= every.seconds * ROUNDING

    check(cases, one)


PLAIN, PER_TOKEN = model(unit("language", 4)), cost_model({"language": 1.0}, degrees=((1, 1),))


def found_on(nodes, per_node, capacity, zeros):
    """Search plans of four layers of 1,000 parameters at 1 + 1 + 2 bytes on two devices."""
    rules = ParameterBytes(1.0, 1.0, 2.0, ranks_per_node=per_node)
    machine = cluster(nodes, per_node, capacity)
    return find(PLAIN, PER_TOKEN, {"language": 8}, 2, 8, machine=machine, rules=rules, zeros=zeros)


def test_state_is_sharded_across_nodes_only_to_fit_replicas():
    alike = dict.fromkeys(EVERY, 1.0)
    found = found_on(2, 1, 14_000, alike)
    assert (found.winner.zero, found.winner.replicas) == ("all", 2)
    assert found.by_zero["all"] < found.by_zero["node"]
    inside = found_on(1, 2, 14_000, alike)
    assert (inside.winner.zero, inside.winner.replicas) == ("node", 2)


def test_of_equally_fast_ways_the_first_is_chosen():
    for zeros in (("node", "none", "all"), ("all", "node", "none"), ("none", "all", "node")):
        assert found_on(2, 1, float("inf"), dict.fromkeys(zeros, 1.0)).winner.zero == zeros[0]


def rescoring(capacity, rescored):
    """Search plans of one layer of 4,000 parameters on two nodes of one device: under `node`, rescored under others."""
    spec, workload = model(unit("language", 1, parameters=4000)), Workload({"language": np.full(8, 1.0)})
    case = spec, PER_TOKEN, cluster(2, 1, capacity), workload, 8
    rules = {zero: ParameterBytes(1.0, 1.0, 2.0, zero, 1) for zero in ("node", *rescored)}
    scorers = {zero: PlanSimulator(*case, rules=own) for zero, own in rules.items()}
    return search(*case, scorers.pop("node"), rules=rules["node"], rescored=scorers)


def test_secondary_sharding_is_searched_when_nothing_else_fits():
    for rescored in ((), ("none",)):
        with pytest.raises(DoesNotFitError):
            rescoring(15_000, rescored)
    found = rescoring(15_000, ("none", "all"))
    assert found.winner.zero == "all"
    assert found.by_zero["node"] is None


def test_best_plan_is_simulated_under_secondary_sharding():
    found = rescoring(float("inf"), ("none", "all"))
    assert found.by_zero.keys() == {"node", "none", "all"}
    assert None not in found.by_zero.values()
    assert found.seconds == min(found.by_zero.values())
