"""A run's coordinator is brought back, be it dead or standing still; where none can be, the run ends and says so."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dilatant.resilience import launch
from dilatant.resilience.launch import COORDINATOR, _Supervisor
from dilatant.resilience.processes import process
from dilatant.resilience.processes.process import Child, ProcessStart
from dilatant.resilience.processes.wire import connect
from dilatant.resilience.protocol.values import Settings
from harness.patience import HANG_SECONDS


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[_Supervisor, ProcessStart]]:
    monkeypatch.setattr(process, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(process, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(launch, "UNATTENDED_SECONDS", 3.0)
    start = ProcessStart("127.0.0.1", 0, (b"t" * 32).hex(), Settings(lease_seconds=0.1), str(tmp_path))
    first = Child(COORDINATOR, start)
    start = ProcessStart("127.0.0.1", first.port, start.token, start.settings, str(tmp_path))
    supervisor = _Supervisor(first, start, [], [], 0)
    yield supervisor, start
    supervisor.close().close()


def answers(start: ProcessStart) -> bool:
    try:
        connect(start.host, start.port, bytes.fromhex(start.token), 5.0).close()
    except OSError:
        return False
    return True


def becomes(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG_SECONDS
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_coordinator_that_is_lost_or_stands_still_is_replaced(
    supervised: tuple[_Supervisor, ProcessStart], fault: int
) -> None:
    supervisor, start = supervised
    assert becomes(lambda: answers(start))
    first = supervisor._coordinator.process.pid
    os.kill(first, fault)
    assert becomes(lambda: supervisor._coordinator.process.pid != first)
    assert becomes(lambda: answers(start))
    assert not supervisor.failure


def test_connection_flood_neither_kills_nor_blocks_coordinator(
    supervised: tuple[_Supervisor, ProcessStart],
) -> None:
    """Idle ones, some that drip bytes and some that shout."""
    supervisor, start = supervised
    assert becomes(lambda: answers(start))
    first = supervisor._coordinator.process.pid
    crowd = [socket.create_connection((start.host, start.port)) for _ in range(500)]
    ended = time.monotonic() + 1.3 * process.ANSWER_SECONDS
    while time.monotonic() < ended:
        for place, stranger in enumerate(crowd[:120]):
            try:
                stranger.send(b"x" if place % 2 else b"\xff" * 4096)
            except OSError:
                crowd[place] = socket.create_connection((start.host, start.port))
        assert answers(start)
    assert supervisor._coordinator.process.pid == first
    for stranger in crowd:
        stranger.close()


def test_run_ends_with_error_when_coordinator_cannot_restart(
    supervised: tuple[_Supervisor, ProcessStart], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor, start = supervised
    assert becomes(lambda: answers(start))
    Path(start.folder, "coordinator.json").write_text("nothing of ours")
    os.kill(supervisor._coordinator.process.pid, signal.SIGKILL)
    assert becomes(lambda: bool(supervisor.failure))
    assert "no coordinator could be started" in supervisor.failure
    said = capfd.readouterr().err
    assert "the coordinator cannot work" in said
    assert "Traceback" not in said


def test_a_coordinator_whose_port_is_taken_says_so_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start = ProcessStart(
            "127.0.0.1", taken.getsockname()[1], (b"t" * 32).hex(), Settings(), str(tmp_path)
        )
        child = Child(COORDINATOR, start)
        assert child.process.wait(HANG_SECONDS) == 1
        child.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the coordinator cannot work: ")
    assert "in use" in line
