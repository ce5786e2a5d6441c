"""Whichever process is killed or stopped, the run continues with the losses of the undisturbed run."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.rate_callback import AFTER, FACTOR, train_with_callback
from cases.tiny_project import tiny_config, write_images
from dilatant.config import load_config
from dilatant.resilience.protocol.values import ASKED
from dilatant.resilience.status import read_status
from dilatant.schedule.schedule import MeasuredStep
from dilatant.training.checkpoints.checkpoint import list_checkpoints
from dilatant.training.run import train
from harness.faults.chaos import Ended, Fault, losses, run_with_faults, slowed

STEPS = 24
TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""


def make_project(folder: Path, parallel: dict[str, Any] | None, **train: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_images(folder, 24)
    schedule = {"kind": "constant"}  # a run of fewer steps has the same losses
    tree = tiny_config(steps=STEPS, global_batch_size=8, save_steps=None, schedule=schedule, **train)
    tree["model"]["language_model"]["config"]["num_hidden_layers"] = 2
    if parallel is not None:
        tree["parallel"] = {**parallel, "microbatches": 2}
        tree["resilience"] = {"enabled": True, "lease_seconds": 10.0, "fence_seconds": 60.0}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


COPIES = {"units": {"language": {"replicas": 4}}, "colocated": {"vision": "language"}}
PIPELINES = {"units": {"language": {"replicas": 2, "pp": 2}}, "colocated": {"vision": "language"}}
APART = {"units": {"vision": {"replicas": 2}, "language": {"replicas": 2, "pp": 2}}}
CHAIN = {"units": {"language": {"pp": 2}}, "colocated": {"vision": "language"}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run in one process."""
    project = make_project(tmp_path_factory.mktemp("undisturbed"), None)
    train(load_config(project / "config.yaml"))
    return losses(project / "run")


def require_equal(ended: Ended, undisturbed: list[float], steps: int = STEPS) -> None:
    assert ended.exit_code == 0, ended.output
    assert ended.losses == pytest.approx(undisturbed[:steps], rel=TOLERANCE), ended.events
    assert ended.events[-1]["reason"] == "finished"
    generations = [event["generation"] for event in ended.events]
    assert generations == sorted(generations)
    steps = [event["step"] for event in ended.events if event["task"] == "run"]
    assert steps == sorted(steps)  # no finished step is lost


@pytest.mark.slow
def test_replicas_survive_loss_of_workers_agent_and_coordinator(tmp_path: Path, undisturbed: list[float]) -> None:
    ended = run_with_faults(
        make_project(tmp_path, COPIES),
        Fault(4, "worker:1"),
        Fault(8, "coordinator"),
        Fault(12, "agent:0", signal.SIGTERM),
        Fault(16, "worker:3", signal.SIGSTOP),
        arguments=changes("resilience.lease_seconds=2"),
    )
    assert ended.injected == 4
    require_equal(ended, undisturbed)
    assert ended.events[-1]["members"] == ["node2"]
    assert any("node0 leaves" in event["reason"] for event in ended.events)
    found = read_status(tmp_path / "run")
    assert (found.step, found.stopped, found.generation) == (STEPS, "finished", ended.events[-1]["generation"])
    assert {node.name: node.is_member for node in found.nodes} == {f"node{n}": n == 2 for n in range(4)}


@pytest.mark.parametrize(
    ("parallel", "nodes", "copies", "steps"),
    [(PIPELINES, 4, 2, 12), pytest.param(APART, 6, 1, STEPS, marks=pytest.mark.slow)],
    ids=["together", "apart"],
)
def test_pipelines_survive_two_losses_and_losses_during_recovery(
    tmp_path: Path, undisturbed: list[float], parallel: dict[str, Any], nodes: int, copies: int, steps: int
) -> None:
    """After the first loss there are enough copies to survive two simultaneous losses."""
    ended = run_with_faults(
        make_project(tmp_path, parallel),
        Fault(2, "agent:0"),
        Fault(5, "worker:3"),
        Fault(5, "coordinator"),
        Fault(5, "worker:1", later=0.1),
        arguments=changes(f"resilience.fault_tolerance={copies}", f"train.steps={steps}", "resilience.lease_seconds=5"),
    )
    assert ended.injected == 4
    require_equal(ended, undisturbed, steps)
    assert len(ended.events[-1]["members"]) == nodes - 3


@pytest.mark.slow
def test_a_rate_that_a_callback_set_survives_losses(tmp_path: Path) -> None:
    """The node of rank 0, whose callbacks alone are called, is lost; then another one, and the coordinator."""
    alone = make_project(tmp_path / "alone", None, logging_steps=1)
    undisturbed = run_with_faults(alone, start=train_with_callback)
    assert undisturbed.exit_code == 0, undisturbed.output
    project = make_project(tmp_path / "run", COPIES, logging_steps=1)
    ended = run_with_faults(
        project, Fault(6, "agent:0"), Fault(10, "coordinator"), Fault(14, "worker:2"), start=train_with_callback
    )
    assert ended.injected == 3
    require_equal(ended, undisturbed.losses)
    for place in (alone, project):
        records = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        rates = [record["learning_rates"]["language"] for record in records if "loss" in record]
        assert rates == [0.005] * AFTER + [0.005 * FACTOR] * (STEPS - AFTER)
        assert {record["figures"]["heard"] for record in records if record.get("figures")} == {*range(1, STEPS + 1)}


@pytest.mark.slow
def test_tensor_parallel_groups_are_rebuilt_on_the_nodes_left(tmp_path: Path, undisturbed: list[float]) -> None:
    """Nodes of one rank: the pipeline that lost a rank forms a group of two again, and its fourth rank is idle."""
    parallel = {"units": {"language": {"replicas": 2, "pp": 2, "tp": 2}}, "colocated": {"vision": "language"}}
    project = make_project(tmp_path, parallel)
    ended = run_with_faults(project, Fault(4, "worker:7"), arguments=changes("train.steps=8"))
    require_equal(ended, undisturbed, 8)
    assert "idle until the next change: node6" in ended.output
    stages = re.findall(r"^rank (\d) \((.*)\):", ended.output, re.MULTILINE)
    first, last, whole = "vision 0 + language 0", "language 1", "vision 0 + language 0"
    assert stages == [*zip("012345", [first, first, last, last, whole, whole])]


@pytest.mark.slow
def test_layers_held_by_no_rank_come_from_newest_checkpoint(tmp_path: Path, undisturbed: list[float]) -> None:
    ended = run_with_faults(
        make_project(tmp_path, CHAIN), Fault(9, "worker:1"), arguments=("--set", "train.save_steps=4")
    )
    assert ended.exit_code == 0, ended.output
    assert ended.losses == pytest.approx(undisturbed, rel=TOLERANCE)
    went_back = [event["step"] for event in ended.events if event["task"] == "run"]
    assert went_back[-1] in (4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (("fewest_nodes=4",), "3 nodes are left of the 4 that are needed"),
        (("fault_tolerance=3", "when_thin=stop"), "3 copies of layers of vision and language left of the 4"),
    ],
)
def test_too_few_nodes_or_copies_end_the_run_with_a_code_for_schedulers(
    tmp_path: Path, limits: tuple[str, ...], says: str
) -> None:
    project = make_project(tmp_path, COPIES)
    arguments = changes(*(f"resilience.{limit}" for limit in limits))
    ended = run_with_faults(project, Fault(3, "worker:2"), arguments=arguments)
    assert ended.exit_code == 75, ended.output
    assert says in ended.output
    found = read_status(project / "run")
    assert (found.exit_code, found.step) == (75, len(ended.losses))
    assert [each.step for each in list_checkpoints(project / "run" / "checkpoints")] == [found.step]


@pytest.mark.slow
def test_a_run_with_too_few_copies_may_save_and_go_on(tmp_path: Path, undisturbed: list[float]) -> None:
    project = make_project(tmp_path, COPIES)
    arguments = changes("resilience.fault_tolerance=3", "resilience.when_thin=save")
    ended = run_with_faults(project, Fault(3, "worker:2"), arguments=arguments)
    require_equal(ended, undisturbed)
    last, thin = (each.step for each in list_checkpoints(project / "run" / "checkpoints"))
    (begun,) = (event["step"] for event in ended.events if event["task"] == "run" and event["generation"] == 2)
    assert (thin, last) == (begun, STEPS)


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_is_not_recorded_as_finished(tmp_path: Path) -> None:
    ended = run_with_faults(make_project(tmp_path, COPIES), Fault(3, "command", signal.SIGTERM))
    assert ended.exit_code == 143, ended.output
    found = read_status(tmp_path / "run")
    assert (found.stopped, found.exit_code) == (ASKED, 75)
    assert f"stopped after step {found.step} of {STEPS}, saved" in ended.output


@pytest.mark.slow
def test_a_mistake_of_the_user_is_said_as_it_is(tmp_path: Path) -> None:
    """The message is the same if only the ranks find the mistake, before or after their rendezvous."""
    project = make_project(tmp_path, CHAIN)
    ended = run_with_faults(project, arguments=("--set", "train.optimizer.learning_rate=1e30"))
    assert ended.exit_code == 2, ended.output
    assert "nothing was updated" in ended.output


@pytest.mark.slow
def test_a_run_that_goes_on_leaves_no_process_behind(tmp_path: Path) -> None:
    project = make_project(tmp_path, CHAIN)
    ended = run_with_faults(project, arguments=("--set", "train.steps=2"))
    assert ended.exit_code == 0, ended.output
    for file in (project / "run" / "resilience").glob("node*.json"):
        document = json.loads(file.read_text())
        for pid in (document["pid"], *document["workers"].values()):
            assert not Path(f"/proc/{pid}/stat").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert len(losses(project / "run")) == 2


@pytest.mark.slow
def test_restarted_node_rejoins_and_holds_layers(tmp_path: Path) -> None:
    steps = 200
    alone = run_with_faults(make_project(tmp_path / "alone", None), arguments=changes(f"train.steps={steps}"))
    project = make_project(tmp_path / "joined", CHAIN)
    arguments = changes("resilience.restarts=2", "parallel.units.language.replicas=2", f"train.steps={steps}")
    ended = run_with_faults(project, Fault(4, "worker:1"), arguments=arguments)
    assert ended.exit_code == 0, ended.output
    # Other sums of the same numbers, for five times as many steps: differences grow with them.
    assert ended.losses == pytest.approx(alone.losses, rel=1e-3)
    assert any("node1." in event["reason"] and "joins" in event["reason"] for event in ended.events), ended.events
    assert len(ended.events[-1]["members"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["null", "1.6"])
def test_slow_rank_gets_fewer_samples_and_too_slow_node_leaves(tmp_path: Path, bound: str) -> None:
    alone = run_with_faults(
        make_project(tmp_path / "alone", None), arguments=changes("train.steps=110", "train.global_batch_size=32")
    )
    project = make_project(tmp_path / "slowed", {**COPIES, "units": {"language": {"replicas": 2}}})
    arguments = changes(
        "train.steps=110",
        "train.global_batch_size=32",
        f"resilience.evict_slower={bound}",
        "resilience.lease_seconds=10",
    )
    with slowed(project / "run", "worker:1", 2):
        ended = run_with_faults(project, arguments=arguments)
    assert ended.exit_code == 0, ended.output
    # Other sums of the same numbers; differences grow with the steps.
    assert ended.losses == pytest.approx(alone.losses, rel=1e-3)
    if bound == "null":
        members = ended.events[-1]["members"]
        assert sorted(members) == ["node0", "node1"]
        step = MeasuredStep.from_json((project / "run" / "step.json").read_text())
        shares = [sum(map(len, own)) for own in step.assignment.microbatches["language"]]
        assert sum(shares) == 32
        assert shares[members.index("node1")] <= 13, ended.output
    else:
        assert ended.events[-1]["members"] == ["node0"]
        assert any("node1 is" in event["reason"] for event in ended.events)


@pytest.mark.slow
def test_deterministic_run_keeps_its_bits_despite_kills(tmp_path: Path) -> None:
    exact = changes("train.deterministic=true")
    alone = run_with_faults(make_project(tmp_path / "alone", None), arguments=exact)
    ended = run_with_faults(
        make_project(tmp_path / "killed", COPIES),
        Fault(4, "worker:1"),
        Fault(9, "worker:3", later=0.05),
        arguments=exact,
    )
    assert ended.exit_code == 0, ended.output
    assert len(ended.events[-1]["members"]) == 2
    assert ended.losses == alone.losses
    rebuilds = (tmp_path / "killed" / "run" / "resilience" / "rebuilds.jsonl").read_text().splitlines()
    # Copies keep weights and optimizer: what a step left in them before it was lost must not count.
    assert [json.loads(line)["stays"] for line in rebuilds] == [False, *[True] * (len(rebuilds) - 1)]


@pytest.mark.slow
def test_a_rank_lost_late_in_a_step_costs_what_it_had_alone(tmp_path: Path) -> None:
    size = changes("train.steps=5", "train.global_batch_size=256", "parallel.microbatches=16")
    alone = run_with_faults(make_project(tmp_path / "alone", None), arguments=size[:4])
    ended = run_with_faults(make_project(tmp_path / "killed", COPIES), Fault(2, "worker:1", share=0.7), arguments=size)
    assert ended.exit_code == 0, ended.output
    assert ended.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    lines = (tmp_path / "killed" / "run" / "metrics.jsonl").read_text().splitlines()
    (again,) = (record for line in lines if "recovery" in (record := json.loads(line)))
    assert 0 < again["recovery"]["salvaged_share"] <= 0.75
    assert again["recovery"]["salvaged_pairs"] > again["recovery"]["missing_pairs"] // 4
    assert "pairs of a layer and a sample were kept" in (tmp_path / "killed" / "run" / "generations.html").read_text()


@pytest.mark.slow
def test_node_leaving_midstep_hands_over_its_gradients(tmp_path: Path) -> None:
    """Another node is slowed, so that a step takes about ten seconds; the one that leaves waits six for its end."""
    size = changes("train.steps=4", "train.global_batch_size=1536", "parallel.microbatches=96")
    alone = run_with_faults(make_project(tmp_path / "alone", None), arguments=size[:4])
    project = make_project(tmp_path / "left", COPIES)
    with slowed(project / "run", "worker:2", 1, works=0.01, stands=0.04):
        ended = run_with_faults(
            project, Fault(2, "agent:1", signal.SIGTERM), arguments=(*size, *changes("resilience.drain_seconds=8"))
        )
    assert ended.exit_code == 0, ended.output
    assert ended.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert any("node1 leaves before the end of the step" in event["reason"] for event in ended.events)
    rebuilds = (tmp_path / "left" / "run" / "resilience" / "rebuilds.jsonl").read_text().splitlines()
    last = json.loads(rebuilds[-1])
    assert (last["ranks_handed_over"], last["salvaged_pairs"] > 0) == (1, True)


def changes(*texts: str) -> tuple[str, ...]:
    return tuple(word for text in texts for word in ("--set", text))
