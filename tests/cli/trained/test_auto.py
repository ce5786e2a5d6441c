"""`parallel: auto`: a run plans for the devices at hand, prints the plan, trains with it and keeps it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from cases.tiny_project import Dilatant
from dilatant.comm.fork_server import warm_up
from dilatant.config import Config, UserError, load_config
from dilatant.cost.model import load_costs
from dilatant.plan import Plan
from dilatant.planning import planning_process
from dilatant.planning.assemble import load_model_tokenizer
from dilatant.planning.auto_plan import Devices, choose_plan
from dilatant.planning.layout import TrainingPlan
from dilatant.planning.measuring.cost_cache import store_costs
from dilatant.planning.planning_process import PlanningJob
from dilatant.planning.problem.describe_model import build_meta_model, describe_model
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.report.run_folder import RunFolder
from dilatant.training.checkpoints.checkpoint import newest_valid
from dilatant.training.run import train
from harness.refused import refused

AUTO = ("--set", "parallel=auto", "--set", "cluster.gpus_per_node=2")
COSTS = ("--set", "plan.costs=costs.yaml")


@pytest.fixture
def costs(project: Path, dilatant: Dilatant) -> Path:
    """Write modelled costs, so that no layer is measured: those of an A40, labelled as this CPU's, with a million times
    the seconds per token and none per call. With realistic costs the fastest plan would leave a device idle."""
    return modelled_costs(project, dilatant)


def modelled_costs(project: Path, dilatant: Dilatant) -> Path:
    path = project / "costs.yaml"
    elsewhere = ("--set", "cluster.hardware=A40", "--set", "train.precision=fp32")
    code, _, err = dilatant("profile", project / "config.yaml", *elsewhere, "--out", path)
    assert code == 0, err
    tree = yaml.safe_load(path.read_text())
    tree["hardware"] = "CPU"
    for degrees in tree["layers"].values():
        for cost in degrees.values():
            for name in ("forward", "input_gradient", "weight_gradient", "first_trainable", "recompute"):
                square, linear, _ = cost[name]
                cost[name] = [1e6 * square, 1e6 * linear, 0.0]
    path.write_text(yaml.safe_dump(tree))
    return path


def config_of(project: Path, *overrides: str) -> Config:
    return load_config(project / "config.yaml", [*overrides, "parallel=auto", "plan.costs=costs.yaml"])


def plan_of(path: Path) -> Plan:
    return Plan.from_json(path.read_text())


@pytest.mark.usefixtures("costs")
def test_an_auto_run_trains_and_resumes_with_its_plan(project: Path, dilatant: Dilatant) -> None:
    few = ("--set", "train.steps=1", "--set", "plan.microbatch_sizes=[1]")
    code, out, err = dilatant("train", project / "config.yaml", *AUTO, *COSTS, *few)
    assert code == 0, err
    run = project / "run"
    for words in (
        "planning\nopening the data\n",  # in a pipe, too, it says what it does
        "planned for 1 node of 2",
        "samples placed by",
        "predicted:",
        "simulated",
        "plan/plan.html",
    ):
        assert words in out, words
    assert plan_of(run / "plan.json") == plan_of(run / "plan" / "plan.json")
    assert plan_of(run / "plan.json").ranks == (0, 1)
    names = {path.name for path in (run / "plan").iterdir()}
    assert names >= {"plan.json", "plan.html", "report.json", "costs.yaml", "config.yaml"}
    made = (run / "plan.json").read_text()
    newest, _ = newest_valid(run / "checkpoints")
    assert newest is not None
    said = io.StringIO()
    kept = choose_plan(load_config(run / "config.yaml"), Devices(1, 2), RunFolder(run), True, Console(file=said))
    assert kept is not None
    assert kept.to_json() == TrainingPlan.from_json(made).to_json()
    assert "as it was planned before" in said.getvalue()
    assert "planning" not in said.getvalue()  # nothing was
    anew = choose_plan(
        load_config(run / "config.yaml", ["cluster.gpus_per_node=4"]),
        Devices(1, 4),
        RunFolder(run),
        True,
        Console(file=said, width=200),
    )
    assert anew is not None
    assert "planned anew: the run had 2 devices, and there are 4 now" in said.getvalue()
    assert anew.plan.ranks == (0, 1, 2, 3)


@pytest.mark.slow
def test_experts_too_large_for_a_device_are_divided_by_auto(project: Path, dilatant: Dilatant) -> None:
    tree = yaml.safe_load((project / "config.yaml").read_text(encoding="utf-8"))
    tree["model"]["language_model"]["config"] |= {
        "model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.1, "intermediate_size": 1024,
    }  # fmt: skip
    tree["cluster"] = {"gpus_per_node": 2, "memory_gib": 0.0029}
    tree["plan"] = {"context_parallel": [1, 2]}
    (project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    modelled_costs(project, dilatant)
    one = dilatant(
        "train",
        project / "config.yaml",
        "--set",
        "parallel=single",
        "--set",
        "output_dir=one",
        "--set",
        "cluster.memory_gib=1",
    )
    assert one[0] == 0, one[2]
    code, _, err = dilatant("train", project / "config.yaml", *AUTO, *COSTS)
    assert code == 0, err
    stages = [
        stage
        for replica in plan_of(project / "run" / "plan.json").unit("language").replicas
        for stage in replica.stages
    ]
    assert {stage.ep for stage in stages} == {2}
    losses = [
        [
            record["loss"]
            for record in map(json.loads, (project / run / "metrics.jsonl").read_text().splitlines())
            if "loss" in record  # others are evaluations
        ]
        for run in ("one", "run")
    ]
    # fp32 sums in another order, which six optimizer steps amplify.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("costs")
def test_auto_plans_with_configured_microbatches_and_schedule(project: Path, dilatant: Dilatant) -> None:
    settings = ("--set", "parallel.microbatches=2", "--set", "parallel.schedule=zb-h1", "--set", "train.steps=1")
    code, _, err = dilatant("train", project / "config.yaml", *AUTO, *COSTS, *settings)
    assert code == 0, err
    step = json.loads((project / "run" / "plan.json").read_text())["step"]
    assert (step["num_microbatches"], step["schedule"]) == (2, "zb-h1")


def test_one_device_leaves_nothing_to_plan(project: Path, dilatant: Dilatant) -> None:
    one = ("--set", "cluster.gpus_per_node=1", "--set", "train.steps=1")
    code, out, err = dilatant("train", project / "config.yaml", *AUTO, *one)
    assert code == 0, err
    assert "one device: nothing to plan" in out
    assert plan_of(project / "run" / "plan.json").ranks == (0,)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("data.train=[{id: some/data, streaming: true}]", "sizes of samples, which a stream does not tell"),
        ("parallel.microbatches=3", "does not divide into parallel.microbatches 3; batches of 3 and 6 do"),
        ("parallel={auto: true, colocated: {vision: language}}", "'colocated' goes with 'units'"),
        ("parallel={auto: true, plan: plan.json}", "not 'auto' and 'plan'"),
        ("parallel=automatic", "it may be 'auto' or 'single'"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(
    project: Path, dilatant: Dilatant, setting: str, says: str
) -> None:
    result = dilatant("train", project / "config.yaml", *AUTO, "--set", setting)
    refused(result, says)
    assert not (project / "run" / "metrics.jsonl").exists()


@pytest.mark.usefixtures("costs")
def test_surplus_launcher_processes_are_refused_with_a_count(project: Path) -> None:
    settings = ("train.global_batch_size=1", "cluster.gpus_per_node=32")
    job = PlanningJob(config_of(project, *settings), "torchrun", project / "run")
    with pytest.raises(UserError, match=r"torchrun started 32 processes, and no plan uses .* Start \d+, or"):
        planning_process._choose(job, lambda text: None)
    assert not (project / "run" / "plan").exists()


def test_auto_reuses_measured_costs_and_says_so(
    project: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    config = load_config(project / "config.yaml", ["parallel=auto", "cluster.gpus_per_node=2"])
    here = plan_target(config.cluster).hardware.name
    measured = replace(load_costs(costs), origin="measured", hardware=here, longest=config.data.max_length)
    measured = replace(measured, layers={
        kind: {degree: replace(cost, fit_error=0.9) for degree, cost in own.items()}
        for kind, own in measured.layers.items()
    })  # fmt: skip
    store_costs(measured, describe_model(build_meta_model(config, len(load_model_tokenizer(config.model)))))
    said: list[str] = []
    chosen = planning_process._choose(PlanningJob(config, "", project / "run"), said.append)
    assert not any(text.startswith("measuring layers") for text in said), said
    assert "with costs measured before (`dilatant profile` measures again):" in "\n".join(chosen.lines)


def test_a_failure_of_the_planning_process_shows_its_trace(project: Path) -> None:
    job = PlanningJob("not a config", "", project / "run")  # type: ignore[arg-type]
    with pytest.raises(planning_process.WorkerFailed, match="planning failed: AttributeError") as failed:
        planning_process.plan_in_process(job, lambda text: None)
    assert "for_devices_here" in failed.value.details


def rank_of_a_launcher(config: Config, variables: dict[str, str], answer: Connection) -> None:
    os.environ.update(variables)
    try:
        result = train(config)
        answer.send((result.step, result.is_first))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.usefixtures("costs")
def test_one_launcher_process_plans_and_all_train_together(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    config = config_of(project, "train.steps=2")
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    warm_up()
    context = multiprocessing.get_context("forkserver")
    answers = []
    for rank in "01":
        ours, theirs = context.Pipe(duplex=False)
        variables = {**launched, "RANK": rank, "LOCAL_RANK": rank}
        context.Process(target=rank_of_a_launcher, args=(config, variables, theirs)).start()
        theirs.close()
        answers.append(ours)
    assert [answer.recv() if answer.poll(200) else "no answer" for answer in answers] == [(2, True), (2, False)]
    assert plan_of(project / "run" / "plan.json") == plan_of(project / "run" / "plan" / "plan.json")
    lines = (project / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
