"""Corrected costs approach the measured times of actions, equally on all ranks, at the same step, also after resume."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice

import numpy as np
import pytest

from cases.engine_case import CASE, PLAN, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.models.core.unit import ModelGraph
from dilatant.plan.cluster import Cluster, Link, cluster_of_groups
from dilatant.plan.costs.stage_costs import KIND_ORDER, StageCosts
from dilatant.plan.costs.step_costs import StepCosts, token_costs
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime
from dilatant.runtime.state.holders import trainable_layers
from dilatant.runtime.step.cost_correction import INTERVAL, CostCorrection, RankWork
from dilatant.runtime.step.step_planner import StepPlanner
from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
from dilatant.schedule.trainability import Trainability, trainability_of
from harness.worker_pool import Worker, WorkerPool

TWO = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 1, (0,)),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 1, (1,)), Stage(1, 2, (2,)))),)),
    )
)


def origin(said: str = "measured on a test") -> StepCosts:
    """Return costs whose square, linear and fixed parts are about equal for rows of thirty tokens."""
    seconds = np.zeros((3, 4, 3))
    seconds[:, 0] = [1e-6, 3e-5, 1e-3]
    seconds[:, 1] = [2e-6, 6e-5, 1e-3]
    seconds[:, 2:] = seconds[:, 1:2] / 2
    none, late, host, gathers = np.zeros((4, 3)), np.zeros((3, 2, 3)), np.zeros((3, 4)), np.zeros((3, 2))
    return StepCosts(
        StageCosts(seconds, none, none, none, none, none, *np.zeros((4, 3)), late, np.ones(3), host, late, gathers),
        origin=said,
    )


def drawn_work(draw: np.random.Generator, costs: StepCosts) -> RankWork:
    """Draw the work of forwards and backwards of twelve microbatches on every stage."""
    parts, group = [], []
    for stage, unit in enumerate((0, 1, 1)):
        for kind in (0, 1):
            for _ in range(12):
                tokens = draw.integers(1, 60, draw.integers(1, 4)).astype(float)
                sums = np.array([(tokens**2).sum(), tokens.sum(), 1.0])
                parts.append(costs.stages.seconds[stage, kind] * sums)
                group.append(2 * unit + kind)
    return RankWork(np.asarray(parts), np.asarray(group))


def one_step(costs: CostCorrection, step: int, work: RankWork, seconds: np.ndarray, ranks: int = 3) -> str | None:
    """Give the correction one step whose actions are spread over ranks; return its warning, if any."""
    totals = np.zeros(costs.num_sums)
    for rank in range(ranks):
        own = slice(rank, None, ranks)
        totals += costs.own(rank, RankWork(work.parts[own], work.group[own]), seconds[own].tolist())
    return costs.finish(step, totals.tolist())


TRUE = np.array([[3.0, 0.5, 1.5], [2.0, 1.0, 4.0], [0.25, 1.2, 2.0], [1.0, 2.5, 0.5]])
"""True seconds of each part, by unit and direction, as multiples of the original costs."""


def test_made_up_true_costs_are_found() -> None:
    draw, costs = np.random.default_rng(3), CostCorrection(TWO, origin())
    for step in range(4 * INTERVAL):
        work = drawn_work(draw, costs.origin)
        true = (work.parts * TRUE[work.group]).sum(axis=1)
        one_step(costs, step, work, true * draw.uniform(0.95, 1.05, len(true)))
    found = costs.costs_at(4 * INTERVAL)
    assert [costs.is_corrected_at(step) for step in (0, 2 * INTERVAL - 1, 4 * INTERVAL)] == [False, False, True]
    work, again = drawn_work(np.random.default_rng(9), costs.origin), np.random.default_rng(9)
    true = (work.parts * TRUE[work.group]).sum(axis=1)
    by_found, by_origin = drawn_work(again, found).parts.sum(axis=1), work.parts.sum(axis=1)
    # Noise of 5 % in some thousand actions leaves less than 1 %; the ridge leaves about as much again.
    assert np.abs(by_found / true - 1).mean() < 0.03
    assert np.abs(by_origin / true - 1).mean() > 0.2
    assert set(costs.drift) == {"vision", "language"}


def test_without_actions_of_a_unit_its_costs_stay() -> None:
    costs = CostCorrection(TWO, origin())
    for step in range(3 * INTERVAL):
        work = drawn_work(np.random.default_rng(step), costs.origin)
        only = RankWork(work.parts[work.group >= 2], work.group[work.group >= 2])
        one_step(costs, step, only, 2 * only.parts.sum(axis=1))
    found = costs.costs_at(3 * INTERVAL).stages.seconds
    assert np.array_equal(found[0], origin().stages.seconds[0])
    assert found[1, 0] == pytest.approx(2 * origin().stages.seconds[1, 0], rel=0.02)
    assert costs.drift == {"language": pytest.approx(2.0)}


SHARED = Plan(
    (
        UnitPlan("vision", (Replica((Stage(0, 1, (0, 1), cp=2),)),), ("language",)),
        UnitPlan("language", (Replica((Stage(0, 1, (2,)),)),)),
    )
)


@dataclass(frozen=True, slots=True)
class Sized:
    sizes: dict[str, int]
    draw: int


def test_few_images_on_shared_ranks_do_not_lower_encoder_costs() -> None:
    """Of two ranks with one image, the rank that has it takes twice an even share and the other nothing: on average the
    costs are right, though the step is planned for the rank with the image."""
    known = origin()
    seconds = known.stages.seconds[:2]
    items = 4  # tokens of an image
    stages = {one.name: getattr(known.stages, one.name)[:2] for one in fields(StageCosts)}
    of_items = np.array([1 / items, 1.0])
    known = replace(
        known, stages=StageCosts(**{**stages, "items_per_token": of_items}), item_tokens={"vision": float(items)}
    )
    costs = CostCorrection(SHARED, known)
    graph = ModelGraph(("vision", "language"), {"vision": ("language",), "language": ()}, "language")
    planner = {
        rank: StepPlanner(SHARED, Trainability((True,) * 2, (True,) * 2), graph, Microbatching(4), costs, rank)
        for rank in SHARED.ranks
    }
    for step in range(3 * INTERVAL):
        samples = [Sized({"vision": items * (1 + draw % 3), "language": 30}, draw) for draw in range(8)]
        totals = np.zeros(costs.num_sums)
        for rank, own in planner.items():
            prepared, taken = own.plan_step(samples, step), []
            for action in prepared.actions:
                stage = SHARED.stages()[action.stage]
                batch = prepared.assignment.microbatches[stage.unit][0][action.microbatch]
                tokens = [samples[one].sizes[stage.unit] for one in batch]
                squares = [count * items if stage.unit == "vision" else count**2 for count in tokens]
                square, linear, fixed = seconds[action.stage, KIND_ORDER.index(action.kind)]
                images = sum(tokens) // items
                mine = (images + 1 - rank) // 2  # the odd one is always the first rank's
                share = 2 * mine / images if stage.unit == "vision" else 1.0
                taken.append(share * (square * sum(squares) + linear * sum(tokens)) + fixed)
            totals += costs.own(rank, prepared.prediction.work, taken)
        costs.finish(step, totals.tolist())
    # The data are exact, and the ridge pulls factors to one, which is right.
    assert costs.costs_at(3 * INTERVAL).stages.seconds == pytest.approx(known.stages.seconds, rel=1e-6)
    assert costs.drift == {"vision": pytest.approx(1.0), "language": pytest.approx(1.0)}


@pytest.mark.parametrize("shares_items", [True, False])
def test_who_always_has_the_odd_image_is_not_slow(shares_items: bool) -> None:
    """One of two ranks has two of three images. If ranks share tokens instead of items, it could have had half."""
    known = origin()
    stages = {one.name: getattr(known.stages, one.name)[:2] for one in fields(StageCosts)}
    stages["items_per_token"] = np.array([0.25 if shares_items else 1.0, 1.0])
    costs = CostCorrection(SHARED, replace(known, stages=StageCosts(**stages)))
    even = np.array([3.0])
    for _ in range(3):
        own = [costs.slowness.own(rank, [2.0 * (2 - rank)], even) for rank in (0, 1)]
        costs.slowness.add(np.sum(own, axis=0))
    assert costs.slowness.decide().tolist() == [1.0 if shares_items else 2.0, 1.0, 1.0]


COPIES = Plan((UnitPlan("language", tuple(Replica((Stage(0, 2, (rank,)),)) for rank in range(3))),))


def pace(costs: CostCorrection, first: int, steps: int, *slower: float) -> None:
    """Run steps in which each rank takes `slower[rank]` times the seconds of the costs."""
    draw = np.random.default_rng(first)
    for step in range(first, first + steps):
        totals = np.zeros(costs.num_sums)
        for rank, times in enumerate(slower):
            parts = np.tile(costs.origin.stages.seconds[rank, 0] * [400.0, 20.0, 1.0], (8, 1))
            seconds = parts.sum(axis=1) * times * draw.uniform(0.95, 1.05, 8)
            work = RankWork(parts, np.zeros(8, dtype=np.int64))
            totals += costs.own(rank, work, seconds.tolist())
        costs.finish(step, totals.tolist())


def test_slow_rank_gets_fewer_samples_until_it_recovers() -> None:
    costs = CostCorrection(COPIES, origin())

    def shares(step: int) -> list[int]:
        now = costs.costs_at(step)
        sizes = now.workload({"language": np.full(60, 20.0)})
        made = assign_step(COPIES, now, sizes, Microbatching(4), "language")
        return [sum(map(len, batches)) for batches in made.microbatches["language"]]

    assert shares(0) == [20, 20, 20]
    pace(costs, 0, 2 * INTERVAL, 3.0, 3.0, 3.4)  # all are slow, none much slower than the others
    assert shares(3 * INTERVAL) == [20, 20, 20]
    pace(costs, 2 * INTERVAL, 2 * INTERVAL, 1.0, 1.0, 2.0)
    assert shares(5 * INTERVAL) == [24, 24, 12]
    again = CostCorrection(COPIES, origin())
    again.from_json(costs.to_json())
    assert again.slowness.factors[2] == pytest.approx(2.0, rel=0.05)
    assert costs.slowness.is_sure
    assert not again.slowness.is_sure  # the resumed run may have other machines
    pace(costs, 4 * INTERVAL, 2 * INTERVAL, 1.0, 1.0, 1.2)  # between the bounds: still slow, less so
    assert 12 < shares(7 * INTERVAL)[2] < 20
    pace(costs, 6 * INTERVAL, 2 * INTERVAL, 1.0, 1.0, 1.05)
    assert shares(9 * INTERVAL) == [20, 20, 20]
    pace(costs, 8 * INTERVAL, 2 * INTERVAL, 1.0, 1.0, 1.2)  # between the bounds: still not slow
    assert shares(11 * INTERVAL) == [20, 20, 20]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))])
def test_no_measurement_makes_costs_negative_or_unbounded(seed: int) -> None:
    draw, costs = np.random.default_rng(seed), CostCorrection(TWO, origin())
    for step in range(2 * INTERVAL):
        work = drawn_work(draw, costs.origin)
        seconds = work.parts.sum(axis=1) * draw.lognormal(0, 2, len(work.parts))
        if step == INTERVAL + 3:
            seconds[draw.integers(len(seconds))] = [np.inf, np.nan, 0.0][seed % 3]
        one_step(costs, step, work, seconds)
    found = costs.costs_at(2 * INTERVAL).stages.seconds
    assert np.isfinite(found).all()
    assert found.min() >= 0


def test_step_costs_do_not_depend_on_when_it_is_planned() -> None:
    eager, late = CostCorrection(TWO, origin()), CostCorrection(TWO, origin())
    draw = np.random.default_rng(0)
    ahead: dict[int, np.ndarray] = {}
    late.costs_at(0)
    for step in range(5 * INTERVAL):
        for planned in range(step, step + INTERVAL + 1):
            ahead.setdefault(planned, eager.costs_at(planned).stages.seconds)
        assert np.array_equal(late.costs_at(step).stages.seconds, ahead[step])
        work = drawn_work(draw, eager.origin)
        seconds = work.parts.sum(axis=1) * draw.uniform(0.5, 3.0, len(work.parts))
        one_step(eager, step, work, seconds)
        one_step(late, step, work, seconds)
    assert not np.array_equal(ahead[4 * INTERVAL], ahead[0])
    with pytest.raises(RuntimeError, match="plan at most 16 steps ahead"):
        eager.costs_at(7 * INTERVAL)


def test_resumed_run_uses_the_costs_of_the_undisturbed_run() -> None:
    through, stopped = CostCorrection(TWO, origin()), CostCorrection(TWO, origin())
    at = 2 * INTERVAL + 5
    for step in range(4 * INTERVAL):
        if step == at:
            resumed = CostCorrection(TWO, origin())
            resumed.from_json(json.loads(json.dumps(stopped.to_json())))
            resumed._settling = 0  # a start has first steps that are not counted; compare all but these
            stopped = resumed
        work = drawn_work(np.random.default_rng(step), through.origin)
        for costs in (through, stopped):
            assert np.array_equal(costs.costs_at(step).stages.seconds, through.costs_at(step).stages.seconds)
            one_step(costs, step, work, 2.5 * work.parts.sum(axis=1))
    assert through.to_json() == stopped.to_json()
    other = CostCorrection(TWO, origin("modelled for a test"))
    other.from_json(through.to_json())
    assert np.array_equal(other.costs_at(9 * INTERVAL).stages.seconds, other.origin.stages.seconds)
    for broken in ("{}", "[]", "x", json.dumps({**json.loads(through.to_json()), "sums": [[1.0]]})):
        with pytest.raises(ValueError, match="not the state of a run's costs"):
            stopped.from_json(broken)


def test_a_state_from_before_slow_ranks_were_looked_for_is_read() -> None:
    run = CostCorrection(TWO, origin())
    document = json.loads(run.to_json())
    for lacking in (("slowness", "slow"), ("slowness",), ("slow",)):
        old = {key: value for key, value in document.items() if key not in lacking}
        resumed = CostCorrection(TWO, origin())
        resumed.from_json(json.dumps(old))
        assert resumed.to_json() == run.to_json()


def test_costs_cached_before_a_state_is_loaded_are_dropped() -> None:
    draw, run = np.random.default_rng(5), CostCorrection(TWO, origin())
    for step in range(2 * INTERVAL):
        work = drawn_work(draw, run.origin)
        one_step(run, step, work, (work.parts * TRUE[work.group]).sum(axis=1))
    resumed = CostCorrection(TWO, origin())
    resumed.costs_at(0)
    resumed.from_json(run.to_json())
    for step in (2 * INTERVAL, 3 * INTERVAL):
        expected = run.costs_at(step).stages.seconds
        assert np.array_equal(resumed.costs_at(step).stages.seconds, expected)
    again = CostCorrection(TWO, origin())
    for step in range(2 * INTERVAL):
        again.finish(step, np.zeros(again.num_sums).tolist())
    again.costs_at(2 * INTERVAL)
    again.from_json(run.to_json())
    assert np.array_equal(again.costs_at(2 * INTERVAL).stages.seconds, run.costs_at(2 * INTERVAL).stages.seconds)


def test_a_time_that_is_no_number_is_not_counted() -> None:
    draw, costs = np.random.default_rng(6), CostCorrection(TWO, origin())
    for step in range(4 * INTERVAL):
        work = drawn_work(draw, costs.origin)
        seconds = (work.parts * TRUE[work.group]).sum(axis=1)
        if step == INTERVAL + 3:
            seconds[5] = np.nan
        one_step(costs, step, work, seconds)
    factors = costs.costs_at(4 * INTERVAL).stages.seconds / costs.origin.stages.seconds
    assert np.isfinite(factors).all()
    assert factors[0, 0].max() > 2  # and the others were


def test_a_long_action_weighs_as_its_length_and_not_its_square() -> None:
    """An action a thousand times as long, with an error of half, moves the common factor by its share of the time."""
    costs = CostCorrection(TWO, origin())
    one = np.array([0.0, 0.0, 1e-3])
    work = RankWork(np.stack([*[one] * 1000, 1000 * one]), np.zeros(1001, dtype=np.int64))
    seconds = work.parts.sum(axis=1)
    seconds[-1] *= 1.5
    for step in range(4 * INTERVAL):
        one_step(costs, step, work, seconds)
    found = costs.costs_at(4 * INTERVAL).stages.seconds[0, 0, 2] / costs.origin.stages.seconds[0, 0, 2]
    assert found == pytest.approx(1.25, rel=0.01)  # half of the time is 1.5 times as long; ridge and rounding


def test_a_unit_far_from_measured_costs_is_told_once() -> None:
    said = {}
    for name, source, times in (
        ("far", "measured on a test", 1.7),
        ("near", "measured on a test", 1.3),
        ("fast", "measured on a test", 0.6),
        ("modelled", "modelled for a test", 9.0),
    ):
        costs = CostCorrection(TWO, origin(source))
        works = [drawn_work(np.random.default_rng(step), costs.origin) for step in range(3 * INTERVAL)]
        told = [one_step(costs, k, work, times * work.parts.sum(axis=1)) for k, work in enumerate(works)]
        said[name] = [text for text in told if text]
    assert [len(said[name]) for name in ("far", "near", "fast", "modelled")] == [1, 0, 1, 0]
    assert "language 1.70 times" in said["far"][0]


def _train_ahead(worker: Worker) -> tuple[str, list[float], dict[str, float]]:
    """Train steps that another thread plans ahead, over two decisions of the correction."""
    comm = Comm(worker.store, worker.rank, worker.size)
    model = build_model(CASE, "meta")
    trains = trainability_of(PLAN, trainable_layers(model.units))
    known = token_costs(PLAN, trains.backward)
    # Each rank has other costs; all must use those of rank 0.
    known = replace(known, origin="measured here").scaled(np.full((1, 1, 3), 1e-6 * (1 + worker.rank)))
    runtime = Runtime(model, PLAN, comm, seed=5, costs=known)
    samples = build_samples(CASE)
    predicted = []
    with ThreadPoolExecutor(1) as pool:
        planned = [pool.submit(runtime.plan_step, samples, step_number=step) for step in range(8)]
        for step in range(2 * INTERVAL + 3):
            planned.append(pool.submit(runtime.plan_step, samples, step_number=step + 8))
            prepared = planned[step].result()
            result = runtime.execute(samples, prepared, step_number=step)
            predicted.append(result.times.predicted_seconds)
    state, drift = runtime.costs.to_json(), dict(result.times.drift)
    runtime.close()
    comm.close()
    return state, predicted, drift


def test_ranks_agree_on_costs_that_follow_their_measurements(workers: WorkerPool) -> None:
    found = workers.run(_train_ahead, 3)
    states, predicted, drift = zip(*found, strict=True)
    assert len(set(states)) == 1
    assert all(other == predicted[0] for other in predicted)
    assert len(set(islice(predicted[0], 2 * INTERVAL))) == 1
    assert predicted[0][2 * INTERVAL] != predicted[0][0]
    assert drift[0] == drift[1] == drift[2]
    assert set(drift[0]) == {"vision", "language"}


def test_unlike_devices_have_factors_of_their_own() -> None:
    """With common factors, slow devices would get the fast devices' costs after the first measurement."""
    links = Link(1e9), Link(1e9)
    groups = [Cluster(1, 2, 1e9, *links, name="a"), Cluster(1, 1, 1e9, *links, name="b")]
    costs = CostCorrection(TWO, replace(origin(), cluster=cluster_of_groups(groups)))
    for step in range(3 * INTERVAL):
        work = drawn_work(np.random.default_rng(step), costs.origin)
        stage = np.repeat([0, 1, 2], 24)
        kind = np.tile(np.repeat([0, 1], 12), 3)
        named = RankWork(work.parts, costs.group_of(stage, kind))
        one_step(costs, step, named, np.where(stage == 2, 3.0, 1.0) * work.parts.sum(axis=1))
    found = costs.costs_at(3 * INTERVAL).stages.seconds / origin().stages.seconds
    assert found[:2] == pytest.approx(np.ones((2, 4, 3)), rel=0.02)
    assert found[2] == pytest.approx(np.full((4, 3), 3.0), rel=0.02)
    assert costs.drift == {name: pytest.approx(drift) for name, drift in
                           {"vision on a": 1.0, "language on a": 1.0, "language on b": 3.0}.items()}  # fmt: skip
