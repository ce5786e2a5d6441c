"""A cluster of light workers, and what can be done to it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dilatant.resilience.processes.coordinator_process import read_record
from dilatant.resilience.processes.process import ProcessStart
from dilatant.resilience.protocol.values import Record, Settings
from harness.faults.light.mesh import write
from harness.faults.light.proxy import Proxy
from harness.faults.light.worker import FAILPOINTS
from harness.patience import HANG_SECONDS

TOKEN = "11" * 32
STEPS = 1_000_000
"""More than any test comes to: it asks the run to end."""
COORDINATOR_FAILPOINTS = ("before_persist", "after_persist", "half_orders")


@dataclass
class Node:
    """control: between its agent and the coordinator; data: between the others and its worker."""

    name: str
    control: Proxy
    data: Proxy
    is_lost: bool = False


@dataclass
class Cluster:
    """size: nodes to begin with, and to be kept up by `replace`."""

    folder: Path
    size: int
    lease_seconds: float = 1.5
    copies: int = 2
    step_seconds: float = 0.01
    nodes: dict[str, Node] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)
    port: int = 0

    def __post_init__(self) -> None:
        self.settings = Settings(
            lease_seconds=self.lease_seconds,
            fence_seconds=3 * self.lease_seconds,
            join_seconds=0.05,
            return_seconds=4 * self.lease_seconds,
            initial=self.size,
            accuse_seconds=0.3,
        )
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "harness.faults.light.zygote"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.start_coordinator()
        for _ in range(self.size):
            self.start_node()

    def close(self) -> None:
        """End all that is left."""
        self.zygote.kill()
        self.zygote.wait()
        for node in self.nodes.values():
            node.control.close()
            node.data.close()

    def start_coordinator(self) -> None:
        (self.folder / "coordinator.port").unlink(missing_ok=True)
        self._fork("coordinator", self._start(port=self.port))
        self.await_(lambda: (self.folder / "coordinator.port").exists(), "a coordinator")
        self.port = int((self.folder / "coordinator.port").read_text().split()[0])

    def start_node(self) -> Node:
        name = f"node{next(self.numbers)}"
        control = Proxy(lambda: self.port)
        data = Proxy(lambda: int((self.folder / f"{name}.listens").read_text()))
        write(self.folder / f"{name}.data", str(data.port))
        node = self.nodes[name] = Node(name, control, data)
        options = {
            "steps": STEPS,
            "copies": self.copies,
            "limit_seconds": 2 * self.lease_seconds,
            "step_seconds": self.step_seconds,
        }
        self._fork("node", self._start(port=control.port, node=name), options)
        return node

    def replace(self) -> None:
        """Start as many nodes as are lost."""
        members = set(self.record.members)
        for node in self.nodes.values():
            node.is_lost |= not self._is_alive(node) or (node.name not in members and self._was_member(node))
        for _ in range(self.size - sum(not node.is_lost for node in self.nodes.values())):
            self.start_node()
        if not _runs(self._coordinator_pid()):
            self.start_coordinator()

    @property
    def record(self) -> Record:
        return read_record(self.folder) or Record()

    def signal(self, node: str, process: str, number: int) -> None:
        """process: "agent" or "worker"."""
        document = json.loads((self.folder / f"{node}.json").read_text())
        pid = document["pid"] if process == "agent" else document["workers"]["0"]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill_coordinator(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._coordinator_pid(), signal.SIGKILL)

    def end(self) -> None:
        """Ask the run to save and end, and wait for that."""
        os.kill(self._coordinator_pid(), signal.SIGTERM)
        self.await_(lambda: bool(self.record.stopped), "the end")

    def steps(self) -> int:
        """The last step that anybody applied."""
        last = 0
        for file in self.folder.glob("node*.history"):
            with file.open("rb") as history:
                history.seek(max(0, file.stat().st_size - 2000))
                lines = history.read().split(b"\n")
            if len(lines) > 1:
                with contextlib.suppress(json.JSONDecodeError):
                    last = max(last, json.loads(lines[-2])["step"])
        return last

    def await_steps(self, more: int = 2, tick: Callable[[], None] = lambda: None) -> None:
        """Steps that were applied from now on."""
        began = self.steps()

        def enough() -> bool:
            tick()
            return self.steps() >= began + more

        self.await_(enough, f"step {began + more}")

    def await_whole(self) -> None:
        """As many members as in the beginning, for the next fault may take two of them."""

        def whole() -> bool:
            self.replace()
            return len(self.record.members) >= self.size

        self.await_(whole, f"a cluster of {self.size}")

    def await_(self, happens: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not happens():
            if self.record.stopped and what != "the end":
                raise AssertionError(f"the run stopped: {self.record.stopped}\n{self.events()}")
            assert time.monotonic() < deadline, f"{what} does not come\n{self.events()}"
            time.sleep(0.02)

    def events(self) -> str:
        file = self.folder / "events.jsonl"
        return "".join(file.read_text().splitlines(keepends=True)[-12:]) if file.exists() else ""

    def histories(self) -> dict[str, list[dict[str, Any]]]:
        return {
            file.stem: [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            for file in self.folder.glob("node*.history")
        }

    def members(self) -> list[str]:
        return [name for name in self.record.members if (self.folder / f"{name}.json").exists()]

    def _was_member(self, node: Node) -> bool:
        file = self.folder / f"{node.name}.history"
        return file.exists() and file.stat().st_size > 0

    def _is_alive(self, node: Node) -> bool:
        file = self.folder / f"{node.name}.json"
        return not file.exists() or _runs(json.loads(file.read_text())["pid"])

    def _coordinator_pid(self) -> int:
        return int((self.folder / "coordinator.port").read_text().split()[1])

    def _start(self, **values: Any) -> ProcessStart:
        return ProcessStart("127.0.0.1", token=TOKEN, settings=self.settings, folder=str(self.folder), **values)

    def _fork(self, role: str, start: ProcessStart, options: dict[str, Any] | None = None) -> None:
        assert self.zygote.stdin is not None
        task = {"role": role, "start": asdict(start), "options": options}
        self.zygote.stdin.write(json.dumps(task).encode() + b"\n")
        self.zygote.stdin.flush()


FAULTS: dict[str, int] = {
    "worker killed": 6,
    "agent killed": 4,
    "two killed": 2,
    "killed in recovery": 3,
    "coordinator killed": 3,
    "connection reset": 2,
    "coordinator and node killed": 2,
    "stopped and continued": 1,
    "worker stopped": 1,
    "cut off": 1,
    "cut off one way": 1,
    "slow network": 1,
    "data cut off": 1,
    "leaves": 2,
    **{f"worker dies {point}": 1 for point in FAILPOINTS},
    **{f"coordinator dies {point}": 1 for point in COORDINATOR_FAILPOINTS},
}
"""What happens to a cluster, and how often of all."""


def inject(cluster: Cluster, kind: str, draw: random.Random) -> None:
    """One fault to a whole cluster, and wait for the first steps after it."""
    cluster.await_whole()
    members = cluster.members()
    victim, other = draw.sample(members, 2) if len(members) > 1 else (members[0], members[0])
    time.sleep(draw.uniform(0, 0.05))
    heal: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "worker killed":
        cluster.signal(victim, "worker", signal.SIGKILL)
    elif kind == "agent killed":
        cluster.signal(victim, "agent", signal.SIGKILL)
    elif kind.startswith("worker dies"):
        point = kind.split()[-1]
        write(cluster.folder / f"{victim}.fail", point)
        if point not in ("prepared", "applied"):  # it takes a reconfiguration to come there
            cluster.signal(other, "worker", signal.SIGKILL)
    elif kind == "two killed":
        for each in (victim, other):
            cluster.signal(each, draw.choice(("agent", "worker")), signal.SIGKILL)
    elif kind == "killed in recovery":
        cluster.signal(victim, "worker", signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.06))
        cluster.signal(other, "worker", signal.SIGKILL)
    elif kind == "coordinator killed":
        cluster.kill_coordinator()
    elif kind == "coordinator and node killed":
        cluster.signal(victim, "worker", signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.03))
        cluster.kill_coordinator()
    elif kind.startswith("coordinator dies"):
        write(cluster.folder / "coordinator.fail", kind.split()[-1])
        cluster.signal(victim, "worker", signal.SIGKILL)
    elif kind == "connection reset":
        cluster.nodes[victim].control.reset()
    elif kind in ("stopped and continued", "worker stopped"):
        process = "worker" if kind == "worker stopped" else draw.choice(("agent", "worker"))
        cluster.signal(victim, process, signal.SIGSTOP)
        time.sleep(cluster.lease_seconds * draw.uniform(0.3, 2.5))
        if kind == "stopped and continued":
            cluster.signal(victim, process, signal.SIGCONT)
    elif kind in ("cut off", "cut off one way"):
        directions = ("in", "out") if kind == "cut off" else (draw.choice(("in", "out")),)
        cluster.nodes[victim].control.hold(*directions)
        time.sleep(cluster.lease_seconds * draw.uniform(0.3, 2.5))
        heal = cluster.nodes[victim].control.heal
    elif kind == "slow network":
        for node in cluster.nodes.values():
            node.control.delay_seconds = draw.uniform(0.0, 0.1)
        heal = lambda: [node.control.heal() for node in cluster.nodes.values()] and None  # noqa: E731
    elif kind == "data cut off":  # the first member is who all exchange values with
        cluster.nodes[members[0]].data.hold()
        heal = cluster.nodes[members[0]].data.heal
    elif kind == "leaves":
        cluster.signal(victim, "agent", signal.SIGTERM)
    else:
        raise ValueError(kind)
    cluster.await_steps(2, cluster.replace)
    heal()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
