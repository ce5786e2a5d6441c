"""Machines come, are lost and are taken back by their cloud; the losses are those of the undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.faults.chaos import losses
from harness.faults.machines import Machines, undisturbed
from harness.patience import HANG_SECONDS

TOLERANCE = 1e-5
"""Relative, in fp32: other ranks add the same numbers in another order."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    made.write_project(replicas=3, lease_seconds=4.0)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_losses_are_unchanged_when_machines_fail_join_and_leave(machines: Machines, tmp_path: Path) -> None:
    leading = machines.start("train", "config.yaml")
    notice = {name: tmp_path / f"{name} is taken" for name in "abcd"}  # one more than the run begins with
    agents = {name: machines.agent(name, "--notice-file", str(notice[name])) for name in "abcd"}
    machines.await_step(4)
    killed, taken = sorted(machines.members())[:2]
    agents[killed].kill()  # with its worker, which ends with it
    machines.await_step(8)
    assert killed not in machines.members()
    notice[taken].touch()
    assert agents[taken].wait(HANG_SECONDS) == 0
    assert leading.wait(HANG_SECONDS) == 0, machines.output
    assert machines.members() == {*"abcd"} - {killed, taken}
    assert losses(machines.run) == pytest.approx(undisturbed(tmp_path / "alone"), rel=TOLERANCE)
    assert machines.status.stopped == "finished"
    reasons = " ".join(event.reason for event in machines.status.events)
    assert "agent is gone" in reasons
    assert "leaves" in reasons
    assert any((machines.run / "export").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_another_machine_leads_when_the_leader_is_gone_for_good(machines: Machines, tmp_path: Path) -> None:
    """With the leader goes the machine of the first rank: coordinator, store and a replica at once."""
    machines.write_project(replicas=3, lease_seconds=3.0, standby=machines.standby)
    leading = machines.start("train", "config.yaml")
    agents = {name: machines.agent(name, *(["--standby"] if name == "b" else [])) for name in "abc"}
    machines.await_step(4)
    for process in (leading, agents["a"]):
        process.kill()
    assert [agents[name].wait(HANG_SECONDS) for name in "bc"] == [0, 0], machines.output
    assert losses(machines.run) == pytest.approx(undisturbed(tmp_path / "alone"), rel=TOLERANCE)
    assert machines.status.stopped == "finished"
    assert machines.members() == {*"bc"}
    assert "this machine leads the run now" in machines.output
    assert any((machines.run / "export").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machine_arriving_without_a_leader_joins_the_next_leader(machines: Machines, tmp_path: Path) -> None:
    """It has asked the leader that is gone what the run is, and its ranks have not begun by then. Steps take a second,
    so that they begin before the run's end."""
    machines.samples = 512
    machines.write_project(replicas=3, lease_seconds=3.0, standby=machines.standby)
    leading = machines.start("train", "config.yaml")
    agents = {name: machines.agent(name, *(["--standby"] if name == "b" else [])) for name in "abc"}
    machines.await_step(4)
    agents["d"] = machines.agent("d")
    machines.await_worker_of(agents["d"])
    for process in (leading, agents["a"]):
        process.kill()
    assert [agents[name].wait(HANG_SECONDS) for name in "bcd"] == [0, 0, 0], machines.output
    assert losses(machines.run) == pytest.approx(undisturbed(tmp_path / "alone", machines.samples), rel=TOLERANCE)
    assert machines.members() == {*"bcd"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_terminated_run_on_several_machines_leaves_a_checkpoint(machines: Machines) -> None:
    leading = machines.start("train", "config.yaml")
    agents = [machines.agent(name) for name in "abc"]
    machines.await_step(3)
    leading.send_signal(signal.SIGTERM)
    assert leading.wait(HANG_SECONDS) == 128 + signal.SIGTERM, machines.output
    assert [agent.wait(HANG_SECONDS) for agent in agents] == [0, 0, 0]
    assert any((machines.run / "checkpoints").iterdir())
