"""Two hosts, each with a network of its own, and a cable between them that is cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.faults.chaos import losses
from harness.faults.machines import Machines, undisturbed
from harness.patience import HANG_SECONDS

TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """Network namespaces that a veth pair connects."""

    names: tuple[str, str]

    def on(self, host: int) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts((f"dilatant-{os.getpid()}-a", f"dilatant-{os.getpid()}-b"))
    first, second = made.names
    try:
        for name in made.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(made.names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        subprocess.run([*made.on(0), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        text = getattr(error, "stderr", None) or str(error).encode()
        pytest.skip(f"network namespaces cannot be made here: {text.decode().strip()}")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_host_with_cut_cable_is_evicted_and_ends_its_processes(hosts: Hosts, tmp_path: Path) -> None:
    machines = Machines(tmp_path, host=ADDRESSES[0])
    machines.write_project(replicas=3, lease_seconds=2.0)
    try:
        leading = machines.start("train", "config.yaml", on=hosts.on(0))
        near = [machines.agent(name, on=hosts.on(0)) for name in "ab"]
        far = machines.agent("c", on=hosts.on(1))
        machines.await_step(5)
        assert machines.members() == {*"abc"}
        hosts.cut()
        assert leading.wait(HANG_SECONDS) == 0, machines.output
        assert machines.members() == {*"ab"}
        assert [agent.wait(HANG_SECONDS) for agent in near] == [0, 0]
        # It hears nothing any more, not even that the run is over: after a minute its connection counts as lost, and
        # the run's folder, which it shares, is asked.
        assert far.wait(HANG_SECONDS) == 0, machines.output
        (lost,) = (node for node in machines.status.nodes if node.name.startswith("node-c"))
        assert not any(Path(f"/proc/{pid}").exists() for pid in (lost.agent, *lost.workers))
        assert losses(machines.run) == pytest.approx(undisturbed(tmp_path / "alone"), rel=TOLERANCE)
        assert any("silent" in event.reason for event in machines.status.events), machines.status.events
    finally:
        machines.close()
