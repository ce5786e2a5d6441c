"""The jobs for Slurm run under Slurm: they train, save before the time limit, are requeued and go on."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.training.checkpoints.checkpoint import list_checkpoints
from harness.slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "slurm"
SLOW = """
import pathlib, time, dilatant

@dilatant.callback
class Slow:
    def on_step(self, run, metrics):
        if not pathlib.Path("hurry").exists():
            time.sleep(0.5)
"""
STEPS = 400
"""More than are done before a job is stopped: two each second."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(cluster: SlurmCluster, folder: Path, script: str, *options: str) -> str:
    """Write a project into a folder, and submit a job that trains it there; returns the job's id."""
    write_images(folder, 12)
    (folder / "slow.py").write_text(SLOW, encoding="utf-8")
    tree = tiny_config(steps=STEPS, callbacks=["slow.Slow"], save_steps=None)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (folder / "bin").mkdir()
    program = folder / "bin" / "dilatant"
    program.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m dilatant "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    path = f"{folder / 'bin'}:{cluster.variables['PATH']}"
    home = {"XDG_CONFIG_HOME": str(folder / "settings")}  # of the token
    cluster_here = SlurmCluster({**cluster.variables, **home, "PATH": path}, cluster.folder)
    return cluster_here.run(
        "sbatch", "--parsable", "--nodes=1", "--output=out", *options, EXAMPLES / script, "config.yaml", "run",
        cwd=folder,
    )  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.parametrize(
    ("script", "options"),
    [("plain.sbatch", ("--ntasks-per-node=2", "--gpus-per-node=2")), ("train.sbatch", ("--gpus-per-node=2",))],
    ids=["plain", "resilient"],
)
@pytest.mark.parametrize("limit", [False, True], ids=["told", "at its limit"])
def test_a_stopped_job_saves_and_goes_on(
    script: str, options: tuple[str, ...], limit: bool, cluster: SlurmCluster, tmp_path: Path
) -> None:
    if limit:  # Slurm looks at its limits twice a minute
        options = (*options, "--time=1", "--signal=TERM@5")
    job = submit(cluster, tmp_path, script, *options)
    cluster.await_state(job, "RUNNING", seconds=60)
    if not limit:
        trained = tmp_path / "run" / "metrics.jsonl"
        cluster.wait_for(trained, job, seconds=120)
        cluster.run("scancel", "--signal=TERM", job)
    state = cluster.await_state(job, "PENDING", "FAILED", "TIMEOUT", "COMPLETED", seconds=200)
    said = (tmp_path / "out").read_text(encoding="utf-8")
    assert (state["JobState"], state["Restarts"]) == ("PENDING", "1"), said
    (saved,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    before = steps_of(tmp_path)
    assert saved.step == before[-1] < STEPS

    (tmp_path / "hurry").touch()
    # By itself it would begin after two minutes; the node does not take it before the second of its end is over.
    cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now+5", "TimeLimit=10")
    state = cluster.await_state(job, "FAILED", "TIMEOUT", "COMPLETED", seconds=300)
    said = (tmp_path / "out").read_text(encoding="utf-8")
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), said
    assert steps_of(tmp_path) == [*range(1, STEPS + 1)]
    assert (tmp_path / "run" / "export").is_dir()
