"""Machines come, are lost and are taken back by their cloud; the losses are those of the undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from cli.tiny_project import tiny_config, write_images
from dilatant.resilience.status import RunStatus, read_status
from resilience.chaos import COMMAND, losses

STEPS = 30
TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""
ENVIRONMENT = {**os.environ, "DILATANT_TOKEN": "a secret of this test alone", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Machines:
    """One process that leads, and agents that stand for machines: each ends with all that it started."""

    project: Path
    port: int = field(default_factory=free_port)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.project / "run"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.project / "output.txt").open("ab")
        with log:
            process = subprocess.Popen(
                [*COMMAND, *arguments], cwd=self.project, stdout=log, stderr=log, env=ENVIRONMENT
            )
        self.running.append(process)
        return process

    def agent(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("agent", "--coordinator", f"127.0.0.1:{self.port}", "--name", name, *arguments)

    def await_step(self, step: int, seconds: float = 500.0) -> None:
        deadline = time.monotonic() + seconds
        while len(losses(self.run)) < step:
            assert time.monotonic() < deadline, self.output
            assert self.running[0].poll() is None, self.output
            time.sleep(0.01)

    @property
    def status(self) -> RunStatus:
        return read_status(self.run)

    @property
    def output(self) -> str:
        return (self.project / "output.txt").read_text()

    def members(self) -> set[str]:
        return {node.name.split("-")[1] for node in self.status.nodes if node.is_member}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    write_images(tmp_path, 24)
    tree = tiny_config(steps=STEPS, global_batch_size=8, save_steps=None)
    tree["parallel"] = {
        "units": {"language": {"replicas": 3}},
        "colocated": {"vision": "language"},
        "microbatches": 2,
    }
    tree["resilience"] = {"enabled": True, "lease_seconds": 4.0, "listen": f"127.0.0.1:{made.port}"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    yield made
    for process in reversed(made.running):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machines_are_lost_join_and_leave_and_the_losses_stay_the_same(
    machines: Machines, tmp_path: Path
) -> None:
    leading = machines.start("train", "config.yaml")
    notice = {name: tmp_path / f"{name} is taken" for name in "abcd"}  # one more than the run begins with
    agents = {name: machines.agent(name, "--notice-file", str(notice[name])) for name in "abcd"}
    machines.await_step(4)
    killed, taken = sorted(machines.members())[:2]
    agents[killed].kill()  # with its worker, which ends with it
    machines.await_step(8)
    assert killed not in machines.members()
    notice[taken].touch()
    assert agents[taken].wait(120) == 0
    assert leading.wait(500) == 0, machines.output
    assert machines.members() == {*"abcd"} - {killed, taken}
    assert losses(machines.run) == pytest.approx(undisturbed(tmp_path / "alone"), rel=TOLERANCE)
    assert machines.status.stopped == "finished"
    reasons = " ".join(event["reason"] for event in machines.status.events)
    assert "agent is gone" in reasons
    assert "leaves" in reasons
    assert any((machines.run / "export").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_machines_that_is_asked_to_stop_is_saved_and_resumed(machines: Machines) -> None:
    leading = machines.start("train", "config.yaml")
    agents = [machines.agent(name) for name in "abc"]
    machines.await_step(3)
    leading.send_signal(signal.SIGTERM)
    assert leading.wait(60) == 128 + signal.SIGTERM, machines.output
    assert [agent.wait(30) for agent in agents] == [0, 0, 0]
    assert any((machines.run / "checkpoints").iterdir())


def undisturbed(folder: Path) -> list[float]:
    folder.mkdir()
    write_images(folder, 24)
    tree = tiny_config(steps=STEPS, global_batch_size=8, save_steps=None)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    subprocess.run([*COMMAND, "train", "config.yaml"], cwd=folder, check=True, env=ENVIRONMENT)
    return losses(folder / "run")
