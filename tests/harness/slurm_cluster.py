"""A Slurm cluster of Debian's packages on loopback: munge, a controller and one node, all in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.faults.machines import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=dilatant
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=5
GresTypes=gpu
ReturnToService=2
KillWait=30
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
"""The node's GPUs are /dev/null, so that `--gpus-per-node` is granted."""
GPUS = 8


@dataclass(frozen=True)
class SlurmCluster:
    """variables: of commands that speak with the cluster. folder: of its state and its logs."""

    variables: dict[str, str]
    folder: Path

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        """Run one of Slurm's commands; returns what it prints."""
        done = subprocess.run(command, env=self.variables, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return the words `key=value` that Slurm has of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_state(self, job: str, *states: str, seconds: float) -> dict[str, str]:
        """Wait until a job has one of these states."""
        deadline = time.monotonic() + seconds
        while (found := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{found}{self.logs()}"
            time.sleep(0.5)
        return found

    def wait_for(self, file: Path, job: str, seconds: float) -> None:
        """Wait until a job has written a file with content."""
        deadline = time.monotonic() + seconds
        while not (file.is_file() and file.stat().st_size):
            state = self.state(job)
            assert state["JobState"] == "RUNNING", f"{state}{self.logs()}"
            assert time.monotonic() < deadline, f"{state}{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        files = sorted(self.folder.glob("*.log"))
        return "".join(f"\n--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the daemons, and end them. Skips the test where they are not installed, or do not start as this user."""
    paths = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") for name in DAEMONS}
    if lacking := [name for name, path in paths.items() if path is None]:
        pytest.skip(f"{', '.join(lacking)} not installed; Debian has them in slurm-wlm and munge")
    if os.geteuid():
        pytest.skip("the daemons of Slurm are started by root")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host, cpus = socket.gethostname().partition(".")[0], os.cpu_count()
    text = CONFIG.format(host=host, folder=folder, cpus=cpus, gpus=GPUS, controller=free_port(), node=free_port())
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    for number in range(GPUS):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    gpus = f"NodeName={host} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n"
    (folder / "gres.conf").write_text(gpus, encoding="utf-8")
    version = subprocess.run([str(paths["slurmd"]), "-V"], capture_output=True, text=True, check=True).stdout.split()[
        -1
    ]
    if int(version.partition(".")[0]) >= 23:  # before, a slurmd without such a file needs no control groups
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n", encoding="utf-8")
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munged.log",
             "seed-file": "munge.seed"}  # fmt: skip
    commands = [
        [paths["munged"], "--foreground", "--force", *(f"--{key}={folder / name}" for key, name in munge.items())],
        [paths["slurmctld"], "-D"],
        [paths["slurmd"], "-D", "-N", host],
    ]
    cluster = SlurmCluster(variables, folder)
    with contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(
                [str(word) for word in command], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while "idle" not in (found := subprocess.run(["sinfo", "-h", "-o", "%t"], env=variables, capture_output=True,
                                                     text=True, check=False)).stdout:  # fmt: skip
            if time.monotonic() > deadline:
                pytest.fail(f"no node came: {found.stdout}{found.stderr}{cluster.logs()}")
            time.sleep(0.5)
        yield cluster
