"""Samples are placed by the seconds that they cost where they run: frozen, squared, fixed, in the pipeline there is."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cases.model_cases import cluster, cost_model, model, unit
from dilatant.cost.dense import DenseRows
from dilatant.plan import Plan, Replica, Stage, UnitPlan, Workload
from dilatant.plan.buckets import BUCKET_BYTES
from dilatant.plan.costs.step_costs import StepCosts, token_costs
from dilatant.plan.costs.sync_time import SyncSeconds
from dilatant.schedule.assignment import step_assignment
from dilatant.schedule.assignment.assign import POLICIES, assign_microbatches
from dilatant.schedule.assignment.pipeline_shape import ByUnit, PipelineShape, shape_seconds
from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.plan_scorer import step_costs
from dilatant.schedule.simulator.graph import build
from dilatant.schedule.simulator.predict import time_step
from dilatant.schedule.trainability import trainability_of

FROZEN = model(unit("vision", 4, ("language",), trainable=False), unit("language", 4))


def plan(pipelines: int, colocated: bool = False) -> Plan:
    """`pipelines` of two stages of each unit, on their own ranks or on the same."""
    step = 2 if colocated else 4

    def chain(first: int) -> Replica:
        return Replica((Stage(0, 2, (first,)), Stage(2, 4, (first + 1,))))

    return Plan(
        (
            UnitPlan("vision", tuple(chain(step * p) for p in range(pipelines)), ("language",)),
            UnitPlan("language", tuple(chain(step * p + step - 2) for p in range(pipelines))),
        )
    )


def samples(count: int, seed: int) -> Workload:
    draw = np.random.default_rng(seed)
    vision = np.rint(np.exp(draw.normal(4.5, 1.0, count)))
    vision[draw.random(count) < 0.3] = 0.0
    return Workload({"vision": vision, "language": vision // 4 + np.rint(np.exp(draw.normal(4.0, 0.8, count)))})


def costs_of(given: Plan, square: float = 4e-6) -> StepCosts:
    layers = cost_model({"vision": 1e-4, "language": 2e-4}, square=square, call=1e-3)
    return step_costs(given, FROZEN, layers, cluster(1, len(given.ranks)))


def seconds_of(
    given: Plan, costs: StepCosts, batch: Workload, how: Microbatching, by: StepCosts
) -> tuple[float, float]:
    """Seconds of a step by `costs`, its samples placed by those of `by`; and of the busiest rank's work."""
    assignment = assign_step(given, by, batch, how, "language")
    trains = trainability_of(given, FROZEN.trainable)
    timed = time_step(build(given, assignment, how.family(given, assignment, trains)), costs, batch)
    return timed.seconds, float(timed.timeline().busy.max())


def test_encoder_replica_serves_adjacent_language_replicas() -> None:
    given = Plan(
        (
            UnitPlan("vision", tuple(Replica((Stage(0, 4, (rank,)),)) for rank in (0, 1)), ("language",)),
            UnitPlan("language", tuple(Replica((Stage(0, 4, (rank,)),)) for rank in (2, 3, 4, 5))),
        )
    )
    batch = samples(32, 1)
    found = assign_step(given, costs_of(given), batch, Microbatching(2), "language").microbatches
    held = {unit: [{s for b in replica for s in b} for replica in found[unit]] for unit in found}
    for replica in (0, 1):
        served = held["language"][2 * replica] | held["language"][2 * replica + 1]
        assert held["vision"][replica] == {s for s in served if batch.tokens["vision"][s] > 0}


@pytest.mark.parametrize("encoders", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("anchors", [1, 2, 3, 4, 6])
def test_a_replica_has_samples_of_those_that_it_is_said_to_serve(encoders: int, anchors: int) -> None:
    ranks = iter(range(encoders + anchors))
    vision, language = (
        tuple(Replica((Stage(0, 4, (next(ranks),)),)) for _ in range(count)) for count in (encoders, anchors)
    )
    given = Plan((UnitPlan("vision", vision, ("language",)), UnitPlan("language", language)))
    found = assign_step(given, costs_of(given), samples(64, 1), Microbatching(2), "language").microbatches
    held = {unit: [{s for b in replica for s in b} for replica in found[unit]] for unit in found}
    served = [step_assignment.served_by(replica, encoders, anchors) for replica in range(encoders)]
    assert set().union(*served) == set(range(anchors))
    for own, numbers in zip(held["vision"], served, strict=True):
        assert own <= set().union(*(held["language"][number] for number in numbers))


@pytest.mark.parametrize(("encoders", "anchors"), [(2, 3), (3, 2), (4, 6), (5, 3), (2, 4), (4, 2)])
def test_replicas_of_any_number_have_equally_many_of_equal_samples(encoders: int, anchors: int) -> None:
    """Of every microbatch."""
    ranks = iter(range(encoders + anchors))
    vision, language = (
        tuple(Replica((Stage(0, 4, (next(ranks),)),)) for _ in range(count)) for count in (encoders, anchors)
    )
    given = Plan((UnitPlan("vision", vision, ("language",)), UnitPlan("language", language)))
    batch = Workload(dict.fromkeys(("vision", "language"), np.full(120, 8.0)))
    found = assign_step(given, costs_of(given), batch, Microbatching(2), "language").microbatches["vision"]
    assert {len(microbatch) for replica in found for microbatch in replica} == {120 // encoders // 2}
    assert sorted(s for replica in found for microbatch in replica for s in microbatch) == [*range(120)]


def test_early_rank_sums_gradients_while_others_compute() -> None:
    given = plan(pipelines=1)
    costs, batch = costs_of(given), samples(16, 0)
    how = Microbatching(4, FAMILIES["1f1b"])
    trains = trainability_of(given, FROZEN.trainable)
    assignment = assign_step(given, costs, batch, how, "language")
    graph = build(given, assignment, how.family(given, assignment, trains))
    timed = time_step(graph, replace(costs, sync=SyncSeconds()), batch)
    little = timed.seconds / 1000  # frozen: the first stage is done long before the last backward
    assert timed.seconds_synced == timed.seconds
    for sync, expected in (({0: little}, timed.seconds), ({2: little, 3: little}, timed.seconds + little)):
        found = time_step(graph, replace(costs, sync=SyncSeconds(after={}, beside=sync)), batch).seconds_synced
        assert found == pytest.approx(expected, rel=1e-12)  # one sum in another order


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "interleaved"])
def test_gradient_buckets_leave_during_the_last_backward(family: str) -> None:
    """Against a queue of buckets for each rank, each ready when its part of the last backward has passed."""
    rounds = 2 if family == "interleaved" else 1
    stages = tuple(Stage(s, s + 1, (s % 2,)) for s in range(2 * rounds))
    given = Plan((UnitPlan("language", (Replica(stages),)),))
    spec = model(unit("language", 2 * rounds))
    costs = step_costs(given, spec, cost_model({"language": 1e-3}), cluster(1, 2))
    for seed in range(20):
        draw = np.random.default_rng(seed)
        held = draw.integers(1, 12, len(stages)) * float(BUCKET_BYTES)
        step = replace(
            costs,
            stages=replace(costs.stages, gradient_bytes=held),
            sync=SyncSeconds({rank: float(draw.random()) for rank in (0, 1)}, {1: 0.25}),
        )
        batch = Workload({"language": draw.integers(1, 200, 8).astype(float)})
        trains = trainability_of(given, spec.trainable)
        assignment = assign_step(given, step, batch, Microbatching(4, FAMILIES[family]), "language")
        timed = time_step(build(given, assignment, FAMILIES[family](given, assignment, trains)), step, batch)
        line = timed.timeline()
        expected = 0.0
        for rank in (0, 1):
            ready = []
            for stage in range(rank, len(stages), 2):
                rows = [
                    (end, start, action.kind)
                    for action, start, end in line.of_rank(rank)
                    if action.stage == stage and action.kind in ("B", "W")
                ]
                end, start, kind = max(rows)
                count = int(held[stage] / BUCKET_BYTES)
                took = step.sync.beside[rank] / (held[rank::2].sum() / BUCKET_BYTES)
                for bucket in range(count):
                    part = 1.0 if kind == "W" else (bucket + 1) / count
                    ready.append((end, start + part * (end - start), took))
            free = 0.0
            for _, at, took in sorted(ready):
                free = max(free, at) + took
            expected = max(expected, free)
        assert timed.seconds_synced == pytest.approx(expected + 0.25, rel=1e-9)


@pytest.mark.parametrize("policy", ["balanced", "searched"])
def test_placement_by_seconds_is_nearer_to_bound_than_by_tokens(policy: str) -> None:
    """The bound of a step is the mean work of the ranks that hold the language model."""
    given = plan(pipelines=2)
    costs = costs_of(given)
    tokens = token_costs(given, trainability_of(given, FROZEN.trainable).backward)
    how = Microbatching(4, FAMILIES["eager"], policy)
    above = {"seconds": [], "tokens": []}
    step = {"seconds": [], "tokens": []}
    for seed in range(6):
        batch = samples(96, seed)
        for name, by in (("seconds", costs), ("tokens", tokens)):
            taken, busiest = seconds_of(given, costs, batch, how, by)
            assignment = assign_step(given, costs, batch, how, "language")
            trains = trainability_of(given, FROZEN.trainable)
            graph = build(given, assignment, how.family(given, assignment, trains))
            busy = time_step(graph, costs, batch).timeline().busy
            above[name].append(busiest / (np.sort(busy)[-4:].mean()))
            step[name].append(taken)
    assert np.mean(above["seconds"]) < np.mean(above["tokens"])
    assert np.mean(step["seconds"]) < np.mean(step["tokens"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("colocated", [False, True])
def test_search_beats_all_policies_under_the_running_family(family: str, colocated: bool) -> None:
    """Also where backward is frozen away, microbatches cost beyond their samples, and units share ranks."""
    given = plan(1, colocated)
    # Linear costs, so that the shape's seconds are those of the step.
    costs = costs_of(given, square=0.0)
    batch = samples(24, 5)
    found = {
        policy: seconds_of(given, costs, batch, Microbatching(6, FAMILIES[family], policy), costs)[0]
        for policy in POLICIES
    }
    # Lags of links and layers that are not alike are no part of the search's model: a small margin.
    assert found["searched"] <= min(found.values()) * 1.02, found
    assert found["searched"] < found["random"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("colocated", [False, True])
def test_what_policies_simulate_is_the_step_that_runs(
    family: str, colocated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit but one, where stages of a unit are alike and messages take no time."""
    given, batch = plan(1, colocated), samples(24, 5)
    table = token_costs(given, trainability_of(given, FROZEN.trainable).backward).stages.seconds * 1e-4
    table[:, 0] += [1e-7, 0.0, 3e-3]
    language = [placed.index for placed in given.stages() if placed.unit == "language"]
    table[language, 1] = 2 * table[language, 0]
    table[language, 2:] = table[language, 1:2] / 2
    costs = token_costs(given, (True,) * 4)
    costs = replace(costs, stages=replace(costs.stages, seconds=table))
    seen = []

    def watched(seconds: np.ndarray, *args: object, shape: PipelineShape, **options: object) -> ByUnit:
        found = assign_microbatches(seconds, *args, shape=shape, **options)
        seen.append(shape_seconds(shape, seconds, found))
        return found

    monkeypatch.setattr(step_assignment, "assign_microbatches", watched)
    taken, _ = seconds_of(given, costs, batch, Microbatching(6, FAMILIES[family], "random"), costs)
    assert seen == [pytest.approx(taken, rel=1e-9)]


def test_replicas_of_unlike_depth_get_samples_by_their_speed() -> None:
    deep = Replica((Stage(0, 2, (1,)), Stage(2, 4, (2,))))
    given = Plan(
        (
            UnitPlan("vision", (Replica((Stage(0, 4, (0,)),)),), ("language",)),
            UnitPlan("language", (deep, Replica((Stage(0, 4, (3,)),)))),
        )
    )
    batch = samples(200, 1)
    assignment = assign_step(given, costs_of(given, 0.0), batch, Microbatching(4), "language")
    work = [
        sum(batch.tokens["language"][list(microbatch)].sum() for microbatch in replica)
        for replica in assignment.microbatches["language"]
    ]
    assert work[0] / work[1] == pytest.approx(2.0, rel=0.1)


def test_the_search_gives_the_same_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given, batch = plan(4), samples(64, 2)
    how = Microbatching(4, FAMILIES["1f1b"], "searched")
    found = []
    for cores in (1, 4, 4):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found.append(assign_step(given, costs_of(given), batch, how, "language"))
    assert found[0] == found[1] == found[2]


def test_costs_survive_json_exactly_and_fit_only_their_plan() -> None:
    given = plan(2)
    costs = replace(
        costs_of(given),
        item_tokens={"vision": 16.0},
        dense={"language": DenseRows((256.0, 512.0), (1.0, 1.7))},
        media_pairs={"language": {"vision": (-0.25, 0.1, 0.0)}},
    )
    document = json.loads(json.dumps(costs.to_document()))
    again = StepCosts.from_document(document, given)
    assert np.array_equal(again.stages.seconds, costs.stages.seconds)
    assert again.to_document() == costs.to_document()
    assert again.cluster == costs.cluster
    assert (again.dense, again.media_pairs) == (costs.dense, costs.media_pairs)
    assert again.sync == costs.sync
    with pytest.raises(ValueError, match="stages that this plan has"):
        StepCosts.from_document(document, plan(3))
    for key, wrong in (("stages", {}), ("cluster", 3), ("sync", [1])):
        with pytest.raises(ValueError, match="not the costs of a step"):
            StepCosts.from_document({**document, key: wrong}, given)
    link = {**document["cluster"]["inside"], "latency": -1.0}
    for key, wrong in (("cluster", {**document["cluster"], "inside": link}), ("sync", {"after": {"0": -1.0}})):
        with pytest.raises(ValueError, match="must be numbers and not negative"):
            StepCosts.from_document({**document, key: wrong}, given)
    seconds = [[[-1.0] * 3] * 4] * len(given.stages())
    with pytest.raises(ValueError, match="finite and not negative"):
        StepCosts.from_document({**document, "stages": {**document["stages"], "seconds": seconds}}, given)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_without_samples_is_a_step_without_actions(policy: str) -> None:
    """As where every sample of a batch is bad, and left out."""
    given = plan(2)
    nothing = costs_of(given).workload({"vision": np.empty(0), "language": np.empty(0)})
    how = Microbatching(3, FAMILIES["1f1b"], policy, row_tokens=10)
    assert seconds_of(given, costs_of(given), nothing, how, costs_of(given)) == (0.0, 0.0)


def test_items_do_not_pay_for_each_others_squares() -> None:
    given = plan(1)
    costs = replace(costs_of(given), item_tokens={"vision": 16.0})
    counted = costs.workload({"vision": np.array([0.0, 48.0]), "language": np.array([5.0, 9.0])})
    assert counted.squares["vision"].tolist() == [0.0, 48 * 16]
