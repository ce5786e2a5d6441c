"""Runs of several machines: one process that leads, and agents that each stand for a machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cases.tiny_project import tiny_config, write_images
from dilatant.resilience.status import RunStatus, read_status
from harness.faults.chaos import COMMAND, losses
from harness.patience import HANG_SECONDS

STEPS = 30
ENVIRONMENT = {**os.environ, "DILATANT_TOKEN": "a secret of this test alone", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Machines:
    """One process that leads, and agents that stand for machines: each ends with all that it started."""

    project: Path
    host: str = "127.0.0.1"
    port: int = field(default_factory=free_port)
    standby: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    samples: int = 8
    """Of a step."""

    def write_project(self, replicas: int, **resilience: Any) -> None:
        """A model of which every machine has a replica."""
        write_images(self.project, 24)
        tree = tiny_config(steps=STEPS, global_batch_size=self.samples, save_steps=None)
        tree["parallel"] = {
            "units": {"language": {"replicas": replicas}},
            "colocated": {"vision": "language"},
            "microbatches": 2,
        }
        tree["resilience"] = {"enabled": True, "listen": f"{self.host}:{self.port}", **resilience}
        (self.project / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")

    @property
    def run(self) -> Path:
        return self.project / "run"

    def start(self, *arguments: str, on: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """on: what comes before the command to run it elsewhere."""
        log = (self.project / "output.txt").open("ab")
        with log:
            process = subprocess.Popen(
                [*on, *COMMAND, *arguments], cwd=self.project, stdout=log, stderr=log, env=ENVIRONMENT
            )
        self.running.append(process)
        return process

    def agent(self, name: str, *arguments: str, on: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        address = f"{self.host}:{self.port}"
        return self.start("agent", "--coordinator", address, "--name", name, *arguments, on=on)

    def await_step(self, step: int, seconds: float = HANG_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while len(losses(self.run)) < step:
            assert time.monotonic() < deadline, self.output
            assert any(each.poll() is None for each in self.running), self.output
            time.sleep(0.01)

    def await_worker_of(self, agent: subprocess.Popen[bytes], seconds: float = HANG_SECONDS) -> None:
        """Wait for the process of its rank, which takes a while until it can do anything."""
        deadline = time.monotonic() + seconds
        while not Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text():
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    @property
    def status(self) -> RunStatus:
        return read_status(self.run)

    @property
    def output(self) -> str:
        return (self.project / "output.txt").read_text()

    def close(self) -> None:
        for process in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def members(self) -> set[str]:
        return {node.name.split("-")[1] for node in self.status.nodes if node.is_member}


def undisturbed(folder: Path, samples: int = 8) -> list[float]:
    folder.mkdir()
    write_images(folder, 24)
    tree = tiny_config(steps=STEPS, global_batch_size=samples, save_steps=None)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    subprocess.run([*COMMAND, "train", "config.yaml"], cwd=folder, check=True, env=ENVIRONMENT)
    return losses(folder / "run")
