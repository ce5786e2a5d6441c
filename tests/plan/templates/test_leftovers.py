"""Idle devices of a plan form one more pipeline if that is faster; the plan is valid and trains on all samples."""

from __future__ import annotations

import random

import numpy as np

from cases.model_cases import cluster, cost_model, model, unit
from cases.search_cases import RULES, search
from dilatant.plan import Workload
from dilatant.plan.validate import plan_problems
from dilatant.report.search_report import compared_plan
from dilatant.report.text.search_reasons import _shape
from dilatant.schedule.assignment.step_assignment import Microbatching, assign_step
from dilatant.schedule.families import FAMILIES
from dilatant.schedule.plan_scorer import PlanSimulator, step_costs
from dilatant.schedule.trainability import trainability_of
from dilatant.schedule.validate import schedule_problems

BATCH = 16


def searched(seed, devices, fills_idle, all_devices=False):
    """Search for a small random model on `devices` devices; return the result and the inputs of the search."""
    draw = random.Random(seed)
    spec = model(
        unit("vision", draw.randint(1, 3), ("language",), parameters=10),
        unit("language", draw.randint(2, 5), parameters=10),
    )
    costs = cost_model({"vision": 0.5, "language": 1.0}, degrees=((1, 1), (2, 1)), output=0.0)
    machine = cluster(1, devices)
    tokens = {name: np.array([float(draw.randint(1, 9)) for _ in range(BATCH)]) for name in ("vision", "language")}
    workload = Workload(tokens)
    scorer = PlanSimulator(spec, costs, machine, workload, BATCH, rules=RULES)
    found = search(
        spec, costs, machine, workload, BATCH, scorer, (1, 2, 4), RULES,
        all_devices=all_devices, fills_idle=fills_idle,
    )  # fmt: skip
    return found, (spec, costs, machine, workload, tokens)


def test_a_leftover_pipeline_keeps_all_samples_and_never_slows():
    gained = 0
    for seed, devices in enumerate([5, 5, 7]):
        plain, _ = searched(seed, devices, fills_idle=False)
        filled, (spec, costs, machine, workload, tokens) = searched(seed, devices, fills_idle=True)
        assert filled.seconds <= plain.seconds
        gained += filled.seconds < plain.seconds
        plans = [one for one in (filled.winner, *filled.runners_up)
                 if any(len({len(r.stages) for r in own.replicas}) > 1 for own in one.plan.units)]  # fmt: skip
        for one in plans[:3]:
            assert not plan_problems(one.plan, spec, machine)
            how = Microbatching(one.num_microbatches)
            assigned = assign_step(
                one.plan, step_costs(one.plan, spec, costs, machine, RULES), workload, how, "language"
            )
            trainability = trainability_of(one.plan, spec.trainable)
            schedule = FAMILIES["1f1b"](one.plan, assigned, trainability)
            everywhere = {name: range(BATCH) for name in tokens}
            assert not schedule_problems(one.plan, assigned, schedule, trainability, samples=everywhere)
    assert gained, "no case had anything to gain: the test says nothing"


def test_samples_of_unlike_pipelines_are_told_in_all():
    """Seven devices: two pipelines of one device and one of four ranks share 16 samples, not 8 each."""
    found, (_, _, machine, *_) = searched(1, 7, fills_idle=True)
    winner, text = found.winner, _shape(found.winner, machine)
    assert len(winner.plan.unit("language").replicas) == winner.replicas + winner.extra == 3
    said = "3 pipelines, one of them on the devices that the others leave, 8 microbatches each, of 16 samples in all: "
    assert text.startswith(said)
    row = compared_plan(winner, machine)
    assert row.name == "encoders in language, 3 pipelines"
    assert row.layout.endswith("; 8 microbatches each, of 16 samples in all")
    assert winner.microbatches == (8, 1)  # 16 samples in 24 microbatches, at least one


def test_where_every_process_must_have_work_leftovers_give_it():
    plain, _ = searched(0, 11, fills_idle=False, all_devices=True)
    filled, _ = searched(0, 11, fills_idle=True, all_devices=True)
    assert filled.winner.idle_devices <= plain.winner.idle_devices
