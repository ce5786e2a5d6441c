"""A coordinator that dies or stops is restarted; if that is impossible, the run ends with an error."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dilatant.resilience.processes import process, supervisor
from dilatant.resilience.processes.messages import connect
from dilatant.resilience.processes.process import COORDINATOR, Child, ProcessStart
from dilatant.resilience.processes.supervisor import CoordinatorSupervisor
from dilatant.resilience.protocol.values import Settings
from harness.patience import HANG_SECONDS


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CoordinatorSupervisor, ProcessStart]]:
    monkeypatch.setattr(process, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(process, "ANSWER_SECONDS", 2.0)
    start = ProcessStart("127.0.0.1", 0, (b"t" * 32).hex(), Settings(lease_seconds=0.1), str(tmp_path))
    coordinator = CoordinatorSupervisor(start)
    yield coordinator, replace(start, port=coordinator.await_port())
    coordinator.close(0.0)


def answers(start: ProcessStart) -> bool:
    try:
        connect(start.host, start.port, bytes.fromhex(start.token), 5.0).close()
    except OSError:
        return False
    return True


def becomes(coordinator: CoordinatorSupervisor, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while not true() and time.monotonic() < deadline:
        coordinator.watch()
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_that_is_lost_or_stands_still_is_replaced(
    supervised: tuple[CoordinatorSupervisor, ProcessStart], fault: int
) -> None:
    coordinator, start = supervised
    assert becomes(coordinator, lambda: answers(start))
    first = coordinator.child.process.pid
    os.kill(first, fault)
    assert becomes(coordinator, lambda: coordinator.child.process.pid != first)
    assert becomes(coordinator, lambda: answers(start))
    assert not coordinator.failure


def test_connection_flood_neither_kills_nor_blocks_coordinator(
    supervised: tuple[CoordinatorSupervisor, ProcessStart],
) -> None:
    """Some connections are idle, some send bytes slowly and some send many."""
    coordinator, start = supervised
    assert becomes(coordinator, lambda: answers(start))
    first = coordinator.child.process.pid
    crowd = [socket.create_connection((start.host, start.port)) for _ in range(500)]
    ended = time.monotonic() + 1.3 * process.ANSWER_SECONDS
    while time.monotonic() < ended:
        for place, stranger in enumerate(crowd[:120]):
            try:
                stranger.send(b"x" if place % 2 else b"\xff" * 4096)
            except OSError:
                crowd[place] = socket.create_connection((start.host, start.port))
        coordinator.watch()
        assert answers(start)
    assert coordinator.child.process.pid == first
    for stranger in crowd:
        stranger.close()


def test_run_ends_with_error_when_coordinator_cannot_restart(
    supervised: tuple[CoordinatorSupervisor, ProcessStart],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    coordinator, start = supervised
    assert becomes(coordinator, lambda: answers(start))
    Path(start.folder, "coordinator.json").write_text("nothing of ours")
    first = coordinator.child.process
    first.kill()
    assert becomes(coordinator, lambda: coordinator.child.process is not first and not coordinator.child.is_alive)
    assert not coordinator.failure
    monkeypatch.setattr(supervisor, "UNATTENDED_SECONDS", 0.1)
    assert becomes(coordinator, lambda: bool(coordinator.failure))
    assert "no coordinator could be started" in coordinator.failure
    said = capfd.readouterr().err
    assert "the coordinator cannot work" in said
    assert "Traceback" not in said


def test_a_coordinator_whose_port_is_taken_says_so_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start = ProcessStart("127.0.0.1", taken.getsockname()[1], (b"t" * 32).hex(), Settings(), str(tmp_path))
        child = Child(COORDINATOR, start)
        assert child.process.wait(HANG_SECONDS) == 1
        child.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the coordinator cannot work: ")
    assert "in use" in line
