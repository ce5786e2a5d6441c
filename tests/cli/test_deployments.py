"""What the files for schedulers ask for is what our commands take, and how a Slurm job ends is how its run did."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import typer
import yaml

import dilatant.config.environment as environment
from dilatant.cli.app import app
from dilatant.config import Config, load_config
from dilatant.config.environment import LaunchPlace, place_from
from dilatant.resilience.processes.coordinator_process import STATE
from dilatant.resilience.protocol.values import ASKED, FINISHED, TOO_FEW, Record

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KUBERNETES = EXAMPLES / "kubernetes"


def resources(file: str) -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((KUBERNETES / file).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pod(resource: dict[str, Any]) -> dict[str, Any]:
    return resource["spec"]["template"]["spec"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "a secret") for each in container["env"]}


def parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its options, as the command line reads them. Raises click.UsageError."""
    program, *arguments = command
    assert program == "dilatant"
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "resolve_command")
    context = group.make_context(program, list(arguments), resilient_parsing=True)
    name, verb, rest = group.resolve_command(context, arguments)
    return name, verb.make_context(name, rest).params


def config_of(command: list[str]) -> Config:
    _, options = parsed(command)
    return load_config(EXAMPLES / "quickstart.yaml", options["overrides"])


PODS = [
    pytest.param(pod(resource), id=f"{file}: {name}")
    for file in ("job.yaml", "elastic.yaml")
    for (_, name), resource in resources(file).items()
    if "template" in resource["spec"]
]


@pytest.mark.parametrize("spec", PODS)
def test_pods_use_commands_keys_and_variables_that_there_are(spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    verb, options = parsed(container["command"])
    assert verb in ("train", "agent")
    if verb == "train":
        load_config(EXAMPLES / "quickstart.yaml", options["overrides"])
    known = set(re.findall(r'"([A-Z_]+)"', Path(environment.__file__).read_text()))
    assert set(variables(container)) <= known
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        each["name"] for each in spec["volumes"]
    }


def test_an_indexed_job_gives_every_pod_its_place() -> None:
    found = resources("job.yaml")
    job = found["Job", "dilatant"]
    spec, (container,) = job["spec"], pod(job)["containers"]
    assert found["Service", pod(job)["subdomain"]]["spec"]["clusterIP"] == "None"
    count = spec["completions"]
    assert spec["parallelism"] == count
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    place = place_from({**variables(container), "JOB_COMPLETION_INDEX": "2"})
    assert place == LaunchPlace(
        "Kubernetes", 2, count, 0, 1, f"dilatant-0.{pod(job)['subdomain']}", 29500, True
    )


def test_agents_find_their_leader_and_have_time_to_leave() -> None:
    found = resources("elastic.yaml")
    leader, agents = found["Job", "dilatant-leader"], found["Deployment", "dilatant-agents"]
    config = config_of(pod(leader)["containers"][0]["command"])
    (agent,) = pod(agents)["containers"]
    _, options = parsed(agent["command"])
    assert config.resilience.address is not None
    host, port = config.resilience.address
    assert host == "0.0.0.0"
    service = found["Service", "dilatant-leader"]["spec"]
    assert service["selector"] == {"job-name": "dilatant-leader"}
    assert [each["port"] for each in service["ports"]] == [port]
    assert options["coordinator"] == f"dilatant-leader:{port}"
    assert pod(agents)["terminationGracePeriodSeconds"] > config.resilience.drain_seconds
    assert agents["spec"]["replicas"] == config.cluster.nodes
    gpus = agent["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == config.resilience.ranks_per_node == config.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("stopped", "code", "requeues"),
    [
        (FINISHED, 0, False),
        (ASKED, 75, True),  # by the time limit
        (f"2 {TOO_FEW} 3", 75, True),
        ("", 75, True),  # nobody leads any more
        ("UserError: bad data", 1, False),
        (None, 2, False),  # it did not begin; what an earlier start wrote must not count
    ],
)
def test_a_slurm_job_ends_as_its_run_did(
    stopped: str | None, code: int, requeues: bool, tmp_path: Path
) -> None:
    record = tmp_path / "run" / "resilience" / STATE
    record.parent.mkdir(parents=True)
    record.write_bytes(msgspec.json.encode(Record(stopped=FINISHED)))
    precious = record.parent / "thesis.tex"  # the folder may be somebody's, and no run's
    precious.write_text("all of it")
    written = tmp_path / "written"
    writes = "" if stopped is None else f"cp {written} {record}"
    written.write_bytes(msgspec.json.encode(Record(stopped=stopped or "")))
    programs = {
        "srun": f'printf "%s\\n" "$@" > asked; {writes}\nexit 137',  # of a task that was lost
        "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "$@" > requeued; fi',
        "dilatant": f'exec {shlex.quote(sys.executable)} -m dilatant "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm" / "train.sbatch", EXAMPLES / "quickstart.yaml", "run"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
             "SLURM_GPUS_ON_NODE": "8"},
    )  # fmt: skip
    assert done.returncode == code
    assert precious.read_text() == "all of it"
    assert (tmp_path / "requeued").exists() == requeues
    asked = (tmp_path / "asked").read_text().splitlines()
    config = config_of(asked[asked.index("dilatant") :])
    assert config.output_dir == str(tmp_path / "run")
    assert config.resilience.standby == "n2:29600"
    assert config.resilience.ranks_per_node == 8
