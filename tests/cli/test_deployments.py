"""Files for schedulers fit their schemas and ask for what our commands take; a Slurm job ends as its run did."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

import dilatant.config.environment as environment
from cases.manifest_schemas import SKYPILOT, manifest_mistakes, mistakes
from dilatant.cli.app import app
from dilatant.config import Config, load_config
from dilatant.config.environment import LaunchPlace, place_from
from dilatant.resilience.processes.agent_run import coordinator_port
from dilatant.resilience.processes.coordinator_process import STATE
from dilatant.resilience.protocol.values import ASKED, FINISHED, TOO_FEW, Record

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
MANIFESTS = sorted(path.name for path in KUBERNETES.glob("*.yaml"))


def resources(file: str) -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((KUBERNETES / file).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


def pod(resource: dict[str, Any]) -> dict[str, Any]:
    return resource["spec"]["template"]["spec"]


def jobs_of(jobset: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The jobs of a JobSet, or of a TrainingRuntime, by their names in it."""
    spec = jobset["spec"] if jobset["kind"] == "JobSet" else jobset["spec"]["template"]["spec"]
    return {each["name"]: each["template"] for each in spec["replicatedJobs"]}


def pods(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod that a file asks for, with what a TrainJob says of those of its runtime."""
    found = resources(file)
    for (kind, name), resource in found.items():
        if kind == "JobSet":
            yield from ((f"{name}.{job}", pod(own)) for job, own in jobs_of(resource).items())
        elif kind == "TrainJob":
            runtime = found["TrainingRuntime", resource["spec"]["runtimeRef"]["name"]]
            spec, trainer = pod(jobs_of(runtime)["node"]), resource["spec"]["trainer"]
            (container,) = spec["containers"]
            limits = {"resources": trainer["resourcesPerNode"]}
            own = {**container, "command": trainer["command"], "env": trainer["env"], **limits}
            yield name, {**spec, "containers": [own]}
        elif kind in ("Job", "Deployment"):
            yield name, pod(resource)


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


def torchrun(command: list[str]) -> Any:
    """The options of a torchrun command as torch reads them, in a pod or on a machine of index 2."""
    program, *arguments = command
    assert program == "torchrun"
    asked = get_args_parser().parse_args([each.replace("$(NODE_RANK)", "2") for each in arguments])
    assert asked.no_python
    return asked


def of_dilatant(command: list[str]) -> list[str]:
    """The command of ours that a command starts."""
    if command[0] != "torchrun":
        return command
    asked = torchrun(command)
    return [asked.training_script, *asked.training_script_args]


@pytest.mark.parametrize("file", MANIFESTS)
def test_manifests_fit_their_schemas(file: str) -> None:
    found = list(yaml.safe_load_all((KUBERNETES / file).read_text()))
    assert [problem for each in found for problem in manifest_mistakes(each)] == []
    assert len(resources(file)) == len(found), "two have one name"
    chosen = {each["metadata"].get("labels", {}).get("run") for each in found}
    assert chosen in ({None}, {"plain", "resilient"})
    assert ("-l run=" in (KUBERNETES / file).read_text()) == (chosen != {None})


def test_the_schemas_notice_what_a_cluster_would_refuse() -> None:
    job = resources("job.yaml")["Job", "dilatant"]
    job["spec"] |= {"completion": 4, "parallelism": "4", "completionMode": "indexed"}
    del pod(job)["containers"][0]["image"]
    place = "dilatant.spec"
    assert manifest_mistakes(job) == [
        f"{place}.completionMode is 'indexed', none of ['Indexed', 'NonIndexed']",
        f"{place}.parallelism is '4', a str",
        f"{place}.template.spec.containers.0.image is missing",
        f"{place}.completion is unknown",
    ]


PODS = [pytest.param(spec, id=f"{file}: {name}") for file in MANIFESTS for name, spec in pods(file)]


@pytest.mark.parametrize("spec", PODS)
def test_pods_use_commands_keys_and_variables_that_there_are(spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    verb, options = parsed(of_dilatant(container["command"]))
    assert verb in ("train", "agent")
    if verb == "train":
        load_config(EXAMPLES / "quickstart.yaml", options["overrides"])
    known = set(re.findall(r'"([A-Z_]+)"', Path(environment.__file__).read_text()))
    expanded = set(re.findall(r"\$\((\w+)\)", " ".join(container["command"])))
    assert set(variables(container)) <= known | expanded
    assert expanded <= set(variables(container))
    user = re.findall(r"^USER (\d+)$", (EXAMPLES.parent / "Dockerfile").read_text(), re.MULTILINE)
    assert [str(spec["securityContext"]["fsGroup"])] == user
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def follows_its_leader(lead: dict[str, Any], agents: dict[str, Any], host: str, machines: int) -> None:
    """Agents connect to where their leader listens, have the devices that it plans for, and time to leave."""
    config = config_of(pod(lead)["containers"][0]["command"])
    (agent,) = pod(agents)["containers"]
    _, options = parsed(agent["command"])
    assert config.resilience.address is not None
    listens, port = config.resilience.address
    assert (listens, options["coordinator"]) == ("0.0.0.0", f"{host}:{port}")
    assert pod(agents)["terminationGracePeriodSeconds"] > config.resilience.drain_seconds
    assert config.cluster.nodes == machines
    gpus = agent["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == config.resilience.ranks_per_node == config.cluster.gpus_per_node


def runs_torchrun(job: dict[str, Any], host: str) -> None:
    """Each pod of an indexed job is a node of torchrun, and pod 0 its host."""
    spec, (container,) = job["spec"], pod(job)["containers"]
    asked = torchrun(container["command"])
    assert (asked.node_rank, asked.master_addr, asked.master_port) == (2, host, 29500)
    assert int(asked.nnodes) == spec["completions"] == spec["parallelism"]
    assert int(asked.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["completionMode"] == "Indexed"
    (rank,) = [each for each in container["env"] if each["name"] == "NODE_RANK"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == index


def test_jobsets_name_their_pods() -> None:
    found = resources("jobset.yaml")
    plain = jobs_of(found["JobSet", "dilatant-plain"])["node"]
    runs_torchrun(plain, "dilatant-plain-node-0-0.dilatant-plain")
    resilient = found["JobSet", "dilatant"]
    jobs = jobs_of(resilient)
    assert resilient["spec"]["successPolicy"]["targetReplicatedJobs"] == ["leader"]
    machines = jobs["agent"]["spec"]["parallelism"]
    follows_its_leader(jobs["leader"], jobs["agent"], "dilatant-leader-0-0.dilatant", machines)


def test_jobs_in_a_queue_find_each_other() -> None:
    found = resources("kueue.yaml")
    for (kind, name), each in found.items():
        if kind == "Job":
            assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
            assert each["spec"]["suspend"], "Kueue starts it"
        else:
            assert each["spec"]["clusterIP"] == "None"
            assert each["spec"]["selector"] == {"job-name": name}
    plain, agents = found["Job", "dilatant-plain"], found["Job", "dilatant-agents"]
    runs_torchrun(plain, f"dilatant-plain-0.{pod(plain)['subdomain']}")
    assert ("Service", pod(plain)["subdomain"]) in found
    fewest = int(agents["metadata"]["annotations"]["kueue.x-k8s.io/job-min-parallelism"])
    assert 0 < fewest < agents["spec"]["parallelism"]
    follows_its_leader(found["Job", "dilatant-leader"], agents, "dilatant-leader", fewest)


def test_trainjobs_run_torchrun_or_one_process_a_machine() -> None:
    found = resources("trainjob.yaml")
    for name in ("dilatant-plain", "dilatant"):
        runtime = found["TrainingRuntime", name]["spec"]
        trainer = found["TrainJob", name]["spec"]["trainer"]
        gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
        assert trainer["numNodes"] == runtime["mlPolicy"]["numNodes"]
        if "torch" in runtime["mlPolicy"]:
            asked = torchrun(trainer["command"])
            assert asked.nnodes == get_args_parser().get_default("nnodes"), "Trainer sets it"
            assert trainer["numProcPerNode"] == runtime["mlPolicy"]["torch"]["numProcPerNode"] == gpus
            continue
        assert jobs_of(found["TrainingRuntime", name])["node"]["spec"]["completionMode"] == "Indexed"
        place = place_from({**variables(trainer), "JOB_COMPLETION_INDEX": "2"})
        host = f"{name}-node-0-0.{name}"
        assert place == LaunchPlace("Kubernetes", 2, trainer["numNodes"], 0, 1, host, 29500, True)
        assert coordinator_port(place) == 29500
        assert config_of(trainer["command"]).resilience.ranks_per_node == gpus


def test_an_indexed_job_gives_every_pod_its_place() -> None:
    found = resources("job.yaml")
    job = found["Job", "dilatant"]
    spec, (container,) = job["spec"], pod(job)["containers"]
    assert found["Service", pod(job)["subdomain"]]["spec"]["clusterIP"] == "None"
    count = spec["completions"]
    assert spec["parallelism"] == count
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    place = place_from({**variables(container), "JOB_COMPLETION_INDEX": "2"})
    assert place == LaunchPlace("Kubernetes", 2, count, 0, 1, f"dilatant-0.{pod(job)['subdomain']}", 29500, True)


def test_agents_find_their_leader_and_have_time_to_leave() -> None:
    found = resources("elastic.yaml")
    leader, agents = found["Job", "dilatant-leader"], found["Deployment", "dilatant-agents"]
    follows_its_leader(leader, agents, "dilatant-leader", agents["spec"]["replicas"])
    service = found["Service", "dilatant-leader"]["spec"]
    assert service["selector"] == {"job-name": "dilatant-leader"}
    assert [each["port"] for each in service["ports"]] == [29400]


def programs_in(folder: Path, programs: dict[str, str]) -> dict[str, str]:
    """Write programs as bash scripts; returns an environment in which they come first."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


ASKED_FOR = 'printf "%s\\n" "${0##*/}" "$@" > asked; env > variables'
"""A program that writes down how it was called."""


def asked_for(folder: Path) -> tuple[list[str], dict[str, str]]:
    lines = (folder / "variables").read_text().splitlines()
    return (folder / "asked").read_text().splitlines(), dict(each.split("=", 1) for each in lines if "=" in each)


def test_a_run_without_a_scheduler_is_plain_or_resilient(tmp_path: Path) -> None:
    given = programs_in(tmp_path, dict.fromkeys(("torchrun", "dilatant"), ASKED_FOR))
    given |= {"HOST0": "10.0.0.1", "NODES": "4", "GPUS": "8", "NODE": "2"}
    for how in ("plain", "resilient"):
        script = [EXAMPLES / "torchrun" / "train.sh", how, "config.yaml", "runs/mine"]
        subprocess.run(["bash", *script], cwd=tmp_path, env=given, check=True)
        command, seen = asked_for(tmp_path)
        config = config_of(of_dilatant(command))
        assert config.train.resume == "auto"
        if how == "plain":
            asked = torchrun(command)
            assert (asked.nnodes, asked.nproc_per_node, asked.node_rank) == ("4", "8", 2)
            assert (asked.master_addr, asked.master_port) == ("10.0.0.1", 29500)
            assert not config.resilience.enabled
        else:
            assert place_from(seen) == LaunchPlace("torchrun", 2, 4, 0, 1, "10.0.0.1", 29500, True)
            assert (config.resilience.enabled, config.resilience.ranks_per_node) == (True, 8)
    wrong = subprocess.run(["bash", script[0], "both", "a", "b"], env=given, capture_output=True)
    assert wrong.returncode == 2


@pytest.mark.parametrize("file", ["plain.yaml", "agent.yaml"])
def test_tasks_of_skypilot_start_our_commands(file: str, tmp_path: Path) -> None:
    text = (EXAMPLES / "skypilot" / file).read_text()
    task = yaml.safe_load(text)
    assert list(mistakes(task, SKYPILOT, file)) == []
    given = programs_in(tmp_path, dict.fromkeys(("torchrun", "dilatant"), ASKED_FOR))
    given |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
              "SKYPILOT_NUM_GPUS_PER_NODE": "8", "LEADER": "10.0.0.9"}  # fmt: skip
    subprocess.run(["bash", "-e", "-c", task["run"]], cwd=tmp_path, env=given, check=True)
    command, _ = asked_for(tmp_path)
    verb, options = parsed(of_dilatant(command))
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    if verb == "train":
        asked = torchrun(command)
        assert (asked.nnodes, asked.nproc_per_node, asked.node_rank) == ("2", "8", 1)
        assert asked.master_addr == "10.0.0.1"
        config_of(of_dilatant(command))
        return
    leader = re.search(r"(dilatant train .*(?:\n#  +--set.*)+)", text)
    assert leader is not None
    config = config_of(shlex.split(re.sub(r"\\?\n# *", " ", leader[1])))
    assert config.resilience.address is not None
    assert options["coordinator"] == f"10.0.0.9:{config.resilience.address[1]}"
    assert config.resilience.ranks_per_node == config.cluster.gpus_per_node == gpus


IMAGES = {
    "": [],
    "dilatant.sif": ["apptainer", "exec", "--nv", "--bind", "HERE", "dilatant.sif"],
    "registry.example.com#dilatant": [],
}
"""Image → what precedes our command in it."""


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("code", [0, 143, 1])
def test_a_plain_slurm_job_is_requeued_at_its_limit(image: str, code: int, tmp_path: Path) -> None:
    asks = {"srun": f"{ASKED_FOR}; exit {code}", "scontrol": 'echo "$@" > requeued'}
    script = ["bash", EXAMPLES / "slurm" / "plain.sbatch", "config.yaml", "run"]
    given = {**programs_in(tmp_path, asks), "SLURM_JOB_ID": "7", "IMAGE": image}
    assert subprocess.run(script, cwd=tmp_path, env=given).returncode == code
    assert (tmp_path / "requeued").exists() == (code == 143)
    command, _ = asked_for(tmp_path)
    at = command.index("dilatant")
    before = [each.replace("HERE", str(tmp_path)) for each in IMAGES[image]]
    assert command[at - len(before) : at] == before
    assert (f"--container-image={image}" in command) == ("#" in image)
    config = config_of(command[at:])
    assert config.output_dir == str(tmp_path / "run")
    assert not config.resilience.enabled


@pytest.mark.parametrize(
    ("stopped", "code", "requeues"),
    [
        (FINISHED, 0, False),
        (ASKED, 75, True),  # by the time limit
        pytest.param(f"2 {TOO_FEW} 3", 75, True, marks=pytest.mark.slow),
        pytest.param("", 75, True, marks=pytest.mark.slow),  # nobody leads any more
        ("UserError: bad data", 1, False),
        (None, 2, False),  # it did not begin; what an earlier start wrote must not count
    ],
)
def test_a_slurm_job_ends_as_its_run_did(stopped: str | None, code: int, requeues: bool, tmp_path: Path) -> None:
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
    given = {**programs_in(tmp_path, programs), "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm" / "train.sbatch", EXAMPLES / "quickstart.yaml", "run"], cwd=tmp_path, env=given
    )
    assert done.returncode == code
    assert precious.read_text() == "all of it"
    assert (tmp_path / "requeued").exists() == requeues
    asked = (tmp_path / "asked").read_text().splitlines()
    config = config_of(asked[asked.index("dilatant") :])
    assert config.output_dir == str(tmp_path / "run")
    assert config.resilience.standby == "n2:29600"
    assert config.resilience.ranks_per_node == 8


@pytest.mark.parametrize("image", IMAGES)
def test_a_resilient_slurm_job_asks_its_record_in_the_image(image: str, tmp_path: Path) -> None:
    writes = 'printf "%s\\n" "${0##*/}" "$@" >> calls; echo . >> calls; '
    hosts = '[ "$1" = show ] && printf "n1\\nn2\\n"'
    asks = dict.fromkeys(("srun", "dilatant", "apptainer"), f"{writes} exit 3") | {"scontrol": hosts}
    script = ["bash", EXAMPLES / "slurm" / "train.sbatch", "config.yaml", "run"]
    given = {**programs_in(tmp_path, asks), "IMAGE": image}
    assert subprocess.run(script, cwd=tmp_path, env=given).returncode == 3
    trains, tells = ((tmp_path / "calls").read_text().split("\n.\n"))[:2]
    before = [each.replace("HERE", str(tmp_path)) for each in IMAGES[image]]
    first, second = trains.splitlines(), tells.splitlines()
    at = first.index("dilatant")
    assert first[at - len(before) : at] == before
    assert config_of(first[at:]).resilience.enabled
    at = second.index("dilatant")
    assert second[at - len(before) : at] == before
    assert second[at + 1 :] == ["status", str(tmp_path / "run"), "--exit-code"]
    assert ("--ntasks=1" in second) == ("#" in image)
    for command in (first, second):
        assert (f"--container-image={image}" in command) == ("#" in image)
