"""`dilatant simulate`: plans and configs on any cluster, steps equal to those trained later, and lost nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases.planning.planning_verbs import FEW, H100, planned, simulated
from cases.tiny_project import Dilatant
from dilatant.config import load_config
from dilatant.planning.assemble import assemble_samples
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.planning import planning_problem, scorer_of
from dilatant.report.plan_report import PlanReport
from dilatant.schedule.schedule import MeasuredStep
from harness.refused import refused


def test_simulating_a_plan_gives_the_time_it_was_planned_with(planned_two: Path, dilatant: Dilatant) -> None:
    folder = planned_two / "run" / "plan"
    report = PlanReport.from_json((folder / "report.json").read_text())
    again = simulated(dilatant, folder)
    mean = sum(again["step_seconds"]) / len(again["step_seconds"])
    assert mean == pytest.approx(report.candidates[0].step_seconds, rel=1e-9)  # the same doubles, summed again
    unused = ("--set", "parallel={units: {vision: {}, language: {}}}")
    two = (*H100, *FEW, "--set", "cluster.gpus_per_node=2")
    code, out, err = dilatant("simulate", planned_two / "config.yaml", *two, *unused, "--json")
    assert code == 0, err
    assert "parallel.units is not used: a plan is searched for" in " ".join(err.split())
    best = json.loads(out)
    assert best["step_seconds"] == again["step_seconds"]
    assert {"1f1b", "zb-h1"} <= again["schedules"].keys()
    assert not any("Schedule" in text for text in report.advice)


def test_a_planned_run_trains_the_step_that_was_simulated(project: Path, planned_two: Path, dilatant: Dilatant) -> None:
    """Compare the last step that the run's ranks measured with the planner's step of the same global batch."""
    folder = planned_two / "run" / "plan"
    plan = folder / "plan.json"
    trained = ("--set", f"parallel={{plan: {plan}}}", "--set", "output_dir=trained", "--set", "train.steps=2")
    code, _, err = dilatant("train", project / "config.yaml", *trained)
    assert code == 0, err
    config = load_config(folder / "config.yaml")
    problem = planning_problem(config, assemble_samples(config))
    found = TrainingPlan.from_json(plan.read_text())
    shared = problem.sharing(found.zero)
    expected = scorer_of(shared).steps(found.plan, found.num_microbatches, found.row_tokens)[1].timeline
    step = MeasuredStep.from_json((project / "trained" / "step.json").read_text())
    assert step.assignment == expected.assignment
    assert step.schedule == expected.schedule


def test_a_plan_is_timed_on_a_cluster_that_is_not_here(planned_two: Path, dilatant: Dilatant) -> None:
    folder = planned_two / "run" / "plan"
    code, out, err = dilatant("simulate", folder / "plan.json", "--cluster", "2x4:A40")
    assert code == 0, err
    assert "2 nodes of 4 × A40" in out
    assert "not measured" in out
    fast = simulated(dilatant, folder)
    slow = simulated(dilatant, folder, "--cluster", "2x4:CPU")
    assert min(slow["step_seconds"]) > max(fast["step_seconds"])


def test_advice_names_untried_schedules_and_needless_recompute(project: Path, dilatant: Dilatant) -> None:
    deep = [f"model.{part}.config.num_hidden_layers=4" for part in ("language_model", "encoders.vision")]
    settings = ["plan.microbatch_sizes=[1]", "train.recompute=block", "parallel.schedule=1f1b", *deep]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    four = ("--set", "cluster.gpus_per_node=4", "--like", "language: {replicas: 1, pp: 3}")  # has a bubble
    report = planned(dilatant, project / "config.yaml", *H100, *four, *arguments)
    found = simulated(dilatant, project / "run" / "plan")["schedules"]
    tried = ("1f1b", "half-eager", "eager", "zb-h1", "zb-h2")
    fastest = min(tried, key=lambda name: found[name]["seconds"])
    assert found[fastest]["seconds"] < 0.99 * report.candidates[0].step_seconds
    assert found[report.schedule]["seconds"] == pytest.approx(report.candidates[0].step_seconds, rel=1e-9)
    assert any(f"Schedule {fastest} would take" in text for text in report.advice)
    assert any("train.recompute: none" in text for text in report.advice)


@pytest.mark.slow
def test_nodes_that_come_and_go(project: Path, dilatant: Dilatant) -> None:
    trace = project / "trace.csv"
    trace.write_text("".join(f"0,add,{node}\n" for node in range(4)) + "600000,remove,1\n900000,add,7\n")
    page = project / "failures.html"
    code, out, err = dilatant(
        "simulate", project / "config.yaml", "--cluster", "1x1:H100", "--failures", trace, "--page", page, "--json"
    )
    assert code == 0, err
    templates, restarts, free = json.loads(out)["replays"]
    assert templates["changes"] == 2
    assert restarts["samples_per_second"] < templates["samples_per_second"] <= free["samples_per_second"]
    assert sum(templates["lost"].values()) < templates["seconds"]
    shown = page.read_text()
    assert "restart from checkpoint" in shown
    assert "× H100, as the trace has them" in shown
    assert "resilience.enabled" in shown


def test_failures_of_sharded_runs_are_not_simulated(project: Path, dilatant: Dilatant) -> None:
    """They train in groups of nodes, which the replay of pipelines of unlike lengths does not know (decision 338)."""
    trace = project / "trace.csv"
    trace.write_text("0,add,0\n0,add,1\n600000,remove,1\n")
    asked = "simulate", project / "config.yaml", "--cluster", "2x2:H100", "--failures", trace
    refused(dilatant(*asked, "--set", "train.shard=weights"), "templates have unlike cuts", "train.shard")


def test_mistakes_in_what_is_simulated(planned_two: Path, dilatant: Dilatant, tmp_path: Path) -> None:
    refused(dilatant("simulate", tmp_path / "none.json"), "cannot be read", "dilatant plan")
    (tmp_path / "not.json").write_text("{}")
    refused(dilatant("simulate", tmp_path / "not.json"), "not a Dilatant plan")
    refused(dilatant("simulate", planned_two / "config.yaml", "--cluster", "8"), "16x8:H100")
    result = dilatant("simulate", planned_two / "run" / "plan", "--cluster", "1x1")
    refused(result, "this plan cannot train", "the cluster has 1 devices")
