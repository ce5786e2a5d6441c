"""The search is complete, respects memory, uses all devices, and explains why a request is impossible."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model_cases import cluster, cost_model, model, unit, vlm_of
from cases.search_cases import RULES, closed_form, encoders_apart, find, random_vlm, search
from dilatant.config.degrees import Degrees
from dilatant.config.errors import UserError
from dilatant.cost.memory import ParameterBytes
from dilatant.plan import (
    BatchError,
    DoesNotFitError,
    EncoderPosition,
    LayerSpec,
    PlanError,
    PlanScore,
    TooFewDevicesError,
    UnitSpec,
    Workload,
)
from dilatant.plan.costs.stage_costs import stage_costs
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.plan.validate import validate
from dilatant.schedule.plan_scorer import PlanSimulator
from oracles.search import best_step, best_with_own_replicas, layer_seconds


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_on_all_devices_is_faster(seed):
    draw = random.Random(seed)
    spec, trains = random_vlm(draw)
    overhead, by_items = draw.choice([0.1, 0.6]), draw.choice([0.0, 0.3, 0.7])  # more than by layers, or less
    costs = cost_model(
        {"vision": draw.random() + 0.1, "language": draw.random() + 0.1},
        overhead=overhead,
        call=draw.choice([0.0, 2.0]),
    )
    shared = cost_model({"vision": costs.layers["vision"][Degrees()].forward.b}, ((1, 2),), by_items)
    costs.layers["vision"][Degrees(cp=2)] = shared.layers["vision"][Degrees(cp=2)]
    tokens = {"vision": draw.randint(1, 9), "language": draw.randint(1, 9)}
    devices, batch = draw.choice([2, 3, 4, 6]), draw.choice([4, 12])
    language = spec.unit("language").trainable

    def seconds(name, flags, upstream):
        by_degree = {tp if cp == 1 else -cp: cost for (tp, cp, _), cost in costs.layers[name].items()}
        layers = type("Costs", (), {"layers": by_degree})
        return lambda tp, samples: layer_seconds(layers, tp, tokens[name] * samples, 1, flags, upstream)

    units = seconds("vision", trains, False), seconds("language", language, any(trains))
    expected = min(
        best_step(*units, (1, 2), devices, batch, (1, 2), by_items=True),
        best_with_own_replicas(*units, (1, 2, -2), devices, batch, (1, 2)),
    )
    if expected == float("inf"):
        return
    found = find(spec, costs, tokens, devices, batch)
    assert found.proven
    assert len(found.winner.plan.ranks) == devices - found.winner.idle_devices
    assert found.seconds == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_plan_that_fits_memory_is_faster(seed):
    draw = random.Random(seed)
    sizes = {"vision": draw.randint(1, 3), "language": draw.randint(2, 4)}
    parameters = {name: [draw.randint(0, 40) for _ in range(count)] for name, count in sizes.items()}
    spec = vlm_of(parameters)
    # Without rows at borders, which cuts are chosen without and plans are scored with.
    costs = cost_model({name: draw.random() + 0.1 for name in sizes}, activation=2.0, output=0.0)
    tokens = {"vision": draw.randint(1, 9), "language": draw.randint(1, 9)}
    devices, batch = draw.choice([2, 3, 4]), draw.choice([4, 12])
    capacity = draw.uniform(60, 500)

    def seconds(name, upstream):
        layers = type("Costs", (), {"layers": {tp: costs.layers[name][Degrees(tp)] for tp in (1, 2)}})
        flags = [True] * sizes[name]
        return lambda tp, samples: layer_seconds(layers, tp, tokens[name] * samples, 1, flags, upstream)

    def fits(*stages):
        held = 0.0
        for name, tp, samples, first, end, in_flight in stages:
            held += 4.0 * sum(parameters[name][first:end]) / tp
            held += in_flight * (end - first) * 2.0 * tokens[name] * samples / tp
        return held <= capacity

    asked = seconds("vision", False), seconds("language", True), (1, 2), devices, batch, (1, 2), fits
    expected = min(best_step(*asked), best_with_own_replicas(*asked))
    machine = cluster(1, devices, capacity)
    if expected == float("inf"):
        with pytest.raises(DoesNotFitError):
            find(spec, costs, tokens, devices, batch, machine=machine)
        return
    found = find(spec, costs, tokens, devices, batch, machine=machine)
    assert max(found.winner.score.peak_bytes) <= capacity
    assert found.seconds == pytest.approx(expected)


VLM = model(unit("vision", 4, ("language",)), unit("language", 8))
COSTS = cost_model({"vision": 1.0, "language": 1.0})
TOKENS = {"vision": 4, "language": 8}


def test_all_devices_run_valid_stages():
    plan = find(VLM, COSTS, TOKENS, 12, 24).winner.plan
    check_plan(plan, {"vision": 4, "language": 8}, 12)
    validate(plan, VLM, cluster(1, 12))
    assert len(plan.ranks) == 12


def ranks_of(plan, name):
    return [rank for replica in plan.unit(name).replicas for stage in replica.stages for rank in stage.ranks]


def check_plan(plan, layers, node):
    for one in plan.units:
        for replica in one.replicas:
            ends = [stage.end for stage in replica.stages]
            assert [stage.first for stage in replica.stages] == [0, *ends[:-1]]
            assert ends[-1] == layers[one.name]
            for stage in replica.stages:
                assert len(stage.ranks) == stage.tp * stage.cp
                for group in range(0, len(stage.ranks), stage.tp):
                    assert len({rank // node for rank in stage.ranks[group : group + stage.tp]}) == 1
        ranks = ranks_of(plan, one.name)
        assert len(ranks) == len(set(ranks))


def test_freezing_moves_devices_from_the_encoder():
    frozen = model(unit("vision", 6, ("language",), trainable=False), unit("language", 6))
    trained = model(unit("vision", 6, ("language",)), unit("language", 6))
    tokens = {"vision": 8, "language": 8}

    def devices(spec):
        found = find(spec, COSTS, tokens, 6, 64, encoders_apart, sizes=(8,))
        return len(ranks_of(found.winner.plan, "vision")) / len(found.winner.plan.ranks)

    assert devices(frozen) < devices(trained)


def test_two_encoders_run_side_by_side_or_together():
    spec = model(unit("vision", 2, ("language",)), unit("audio", 2, ("language",), kind="vision"), unit("language", 4))
    workload = Workload({name: np.full(24, 8.0) for name in ("vision", "audio", "language")})
    slow = PlanScore(1e9, 0.0, 0.0, {}, ())  # no plan can be ruled out, so all are tried
    found = search(
        spec, COSTS, cluster(1, 6), workload, 24, lambda plan, *_: slow, (1, 2), RULES, 10_000, only=encoders_apart
    )
    tried = (found.winner, *found.runners_up)
    assert {one.encoders_at for one in tried} == {EncoderPosition.PARALLEL, EncoderPosition.COLOCATED}
    for one in tried:
        together = set(ranks_of(one.plan, "vision")) & set(ranks_of(one.plan, "audio"))
        assert bool(together) == (one.encoders_at is EncoderPosition.COLOCATED)
        check_plan(one.plan, {"vision": 2, "audio": 2, "language": 4}, 6)


def test_a_generator_follows_the_language_model():
    spec = model(unit("vision", 2, ("language",)), unit("language", 4, ("image",)), unit("image", 2, kind="vision"))
    found = find(spec, COSTS, {"vision": 4, "language": 8, "image": 4}, 5, 20)
    check_plan(found.winner.plan, {"vision": 2, "language": 4, "image": 2}, 5)
    assert found.winner.idle_devices == 0


def test_a_language_model_alone_is_planned_too():
    found = find(model(unit("language", 8)), COSTS, {"language": 8}, 8, 32)
    assert found.winner.idle_devices == 0
    assert found.proven


def test_plans_stay_inside_memory_and_pay_for_it():
    free = find(VLM, COSTS, TOKENS, 4, 16)
    peak = max(free.winner.score.peak_bytes)
    tight = find(VLM, COSTS, TOKENS, 4, 16, machine=cluster(1, 4, 0.7 * peak))
    assert max(tight.winner.score.peak_bytes) <= 0.7 * peak
    assert tight.seconds >= free.seconds


def test_stages_are_cut_by_memory_where_the_even_cut_overflows():
    kind = type(VLM.units[1].layers[0])
    heavy = [kind(f"language.{k}", "language", parameters, True) for k, parameters in enumerate([900, 100, 100, 100])]
    spec = model(type(VLM.units[1])("language", tuple(heavy)))
    machine = cluster(1, 2, 4 * 900.0 + 2 * 200)  # the first layer at 4 bytes a parameter, and some activations
    found = find(
        spec,
        cost_model({"language": 1.0}, ((1, 1),), activation=20.0),
        {"language": 4},
        2,
        4,
        sizes=(1,),
        machine=machine,
    )
    assert [stage.first for stage in found.winner.plan.unit("language").replicas[0].stages] == [0, 1]
    assert max(found.winner.score.peak_bytes) <= machine.bytes_per_device


def test_memory_that_no_plan_fits_names_the_unit_and_the_bytes():
    heavy = model(unit("vision", 1, ("language",), parameters=10), unit("language", 2, parameters=10**9))
    with pytest.raises(DoesNotFitError, match=r"unit 'language' needs about 1\.7\d GiB more"):
        # A layer of a billion parameters at 4 bytes on each device, against 2 GiB.
        find(heavy, COSTS, TOKENS, 2, 4, machine=cluster(1, 2, 2.0 * 2**30))


def test_too_few_devices_are_refused_with_the_needed_number():
    wide = cost_model({"vision": 1.0, "language": 1.0}, degrees=((2, 1),))
    spec = model(unit("language", 4, ("image",)), unit("image", 2, kind="vision"))
    with pytest.raises(TooFewDevicesError, match="fewer than the 4"):
        find(spec, wide, {"language": 8, "image": 4}, 3, 8)


def test_an_indivisible_batch_is_refused_with_the_nearest_size():
    with pytest.raises(BatchError, match="nearest batches that do are 8 and 12") as caught:
        find(VLM, COSTS, TOKENS, 4, 10, sizes=(4, 8))
    assert caught.value.nearest == (8, 12)


def test_devices_that_no_shape_can_use_are_reported_idle():
    wide = cost_model({"vision": 1.0, "language": 1.0}, degrees=((2, 1),))
    found = find(VLM, wide, TOKENS, 5, 8)
    assert found.winner.idle_devices == 1


def test_a_number_of_microbatches_that_is_asked_for_is_kept():
    machine = cluster(1, 4)
    workload = Workload({name: np.full(24, float(count)) for name, count in TOKENS.items()})
    scorer = closed_form(VLM, COSTS, TOKENS, 24)
    found = search(VLM, COSTS, machine, workload, 24, scorer, rules=RULES, num_microbatches=6)
    assert {one.num_microbatches for one in (found.winner, *found.runners_up)} == {6}


def test_layer_copies_lie_on_the_required_nodes_and_cost_time():
    machine = cluster(4, 2)
    workload = Workload({name: np.full(24, float(count)) for name, count in TOKENS.items()})
    scorer = closed_form(VLM, COSTS, TOKENS, 24)

    def found(copies):
        return search(VLM, COSTS, machine, workload, 24, scorer, rules=RULES, copies=copies)

    seconds = []
    for copies in (1, 2, 3, 4):
        result = found(copies)
        for one in (result.winner, *result.runners_up):
            assert min(copies_on_nodes(one.plan, 2).values()) >= copies
        seconds.append(result.seconds)
    assert seconds == sorted(seconds)
    with pytest.raises(PlanError, match="no plan has every layer on 5 nodes"):
        found(5)


def test_missing_costs_name_the_layer_type():
    with pytest.raises(UserError, match="no layer type 'vision'"):
        find(VLM, cost_model({"language": 1.0}), TOKENS, 4, 8)


def test_other_graphs_are_refused():
    spec = model(unit("a", 1, ("b",)), unit("b", 1, ("c",)), unit("c", 1, ("d",)), unit("d", 1))
    with pytest.raises(PlanError, match="encoders that feed one language model"):
        find(spec, COSTS, dict.fromkeys("abcd", 1), 4, 4)


def test_few_finalists_leave_an_honest_gap():
    found = find(VLM, COSTS, TOKENS, 12, 24, finalists=1)
    everything = find(VLM, COSTS, TOKENS, 12, 24)
    assert found.lower_bound <= everything.seconds <= found.seconds * (1 + 1e-9)
    assert found.proven == (found.seconds <= found.lower_bound)


def test_candidates_that_were_skipped_weaken_the_proof():
    """A chain that overflowed memory is not tried again with other parts, so nothing is known of those plans."""
    spec = model(unit("vision", 2, ("language",)), unit("language", 4))
    workload = Workload({name: np.full(24, 8.0) for name in ("vision", "language")})
    machine = cluster(1, 6, 1e9)

    def scorer(overflows):
        def score(plan, microbatches, row_tokens, *_):
            full = overflows and len(plan.unit("language").replicas[0].stages) == 2
            return PlanScore(1e9, 0.0, 0.0, {}, (2e9 if full else 0.0,) * len(plan.ranks))

        return score

    complete, partial = (
        search(spec, COSTS, machine, workload, 24, scorer(full), (1, 2), RULES, 10_000, only=encoders_apart)
        for full in (False, True)
    )
    assert complete.proven
    assert partial.rejected
    simulated = 1 + len(partial.runners_up) + len(partial.rejected)
    assert simulated < 1 + len(complete.runners_up)
    assert not partial.proven


@pytest.mark.parametrize(("zero", "nodes", "replicas"), [("none", 1, 1), ("node", 1, 2), ("node", 2, 1), ("all", 2, 2)])
def test_replicas_that_fit_only_with_sharded_state_are_found(zero, nodes, replicas):
    """A replica takes 4 layers of 1000 parameters at 1 + 1 + 2 bytes; two that shard state, at 1 + 1 + 1 each."""
    spec, costs = model(unit("language", 4)), cost_model({"language": 1.0}, degrees=((1, 1),))
    rules = ParameterBytes(1.0, 1.0, 2.0, zero, 2 // nodes)
    machine = cluster(nodes, 2 // nodes, 14_000)
    found = find(spec, costs, {"language": 8}, 2, 8, machine=machine, rules=rules)
    assert found.winner.replicas == replicas
    # In these sums two replicas have no bubble, so they win wherever they fit.
    assert max(found.winner.score.peak_bytes) <= 14_000


def test_a_tied_table_is_held_once_by_who_holds_both_ends():
    layers = [LayerSpec("language.0", "language", 1000), LayerSpec("language.1", "language", 1010, tied=1000)]
    spec, costs = (
        model(UnitSpec("language", tuple(layers))),
        cost_model({"language": 1.0}, activation=0.0, output=0.0),
    )
    whole, halves = (
        stage_costs(plan, spec, costs, RULES).static_bytes.tolist()
        for plan in (
            Plan((UnitPlan("language", (Replica((Stage(0, 2, (0,)),)),)),)),
            Plan((UnitPlan("language", (Replica((Stage(0, 1, (0,)), Stage(1, 2, (1,)))),)),)),
        )
    )
    assert whole == [4 * 1010]
    assert halves == [4 * 1000, 4 * 1010]
    # What fits one device is planned for one device.
    found = find(spec, costs, {"language": 1}, 1, 2, machine=cluster(1, 1, 4 * 1010))
    assert found.winner.score.peak_bytes == (4 * 1010,)


def test_interleaved_stages_are_chosen_where_the_bubble_shrinks():
    """No device holds more than four of 16 layers, so every plan is one pipeline of four devices."""
    spec, costs = model(unit("language", 16)), cost_model({"language": 1e-3}, ((1, 1),))
    workload = Workload({"language": np.full(8, 8.0)})
    machine = cluster(1, 4, 4 * 4 * 1000.0 + 8 * 8 * 4 * 10.0)
    scorer = PlanSimulator(spec, costs, machine, workload, 8, rules=RULES)

    def found(chunks):
        return search(spec, costs, machine, workload, 8, scorer, (1,), RULES, 10_000, chunks=chunks)

    plain, round_trips = found((1,)), found((1, 2, 4))
    stages = round_trips.winner.plan.unit("language").replicas[0].stages
    assert len(stages) > len({stage.ranks for stage in stages})
    assert round_trips.winner.score.schedule == "interleaved"
    # The bubble of four ranks and eight microbatches, 3 of 11 steps, in half or a quarter; halves leave a third.
    assert plain.winner.score.schedule.startswith("zb-")
    assert round_trips.seconds < 0.97 * plain.seconds
    validate(round_trips.winner.plan, spec, machine)
