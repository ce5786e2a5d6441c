"""Run `dilatant train` with faults at chosen steps, and collect its output, losses and events."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilatant.cli.app import main
from harness.fork_server import start_fork_server
from harness.patience import HANG_SECONDS

COMMAND = [sys.executable, "-c", "from dilatant.cli.app import main; main()"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to a process after a step. victim: "worker:1", "agent:1" (of node 1), "coordinator" or "command".
    later: seconds between step and signal. share: the same as a share of that step's seconds, for a signal that has to
    fall into the next step on machines of any speed."""

    after_step: int
    victim: str
    signal: int = signal.SIGKILL
    later: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    exit_code: int
    losses: list[float]
    events: list[dict[str, Any]]
    output: str
    injected: int


def run_with_faults(
    project: Path,
    *faults: Fault,
    arguments: tuple[str, ...] = (),
    limit: float = HANG_SECONDS,
    start: Callable[[], object] = main,
) -> Ended:
    """Train `project/config.yaml` by `start`, the command line, and inject the faults, in their order. The process is
    forked from a fork server that has imported its modules."""
    run = project / "run"
    log = project / "output.txt"
    injected = 0
    start_fork_server()
    command = multiprocessing.get_context("forkserver").Process(
        target=_command, args=(start, project, log, ("train", "config.yaml", "--overwrite", *arguments))
    )
    command.start()
    deadline = time.monotonic() + limit
    try:
        for fault in faults:
            while len(losses(run)) < fault.after_step and command.is_alive():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.005)
            time.sleep(fault.later + fault.share * _step_seconds(run))
            pid = command.pid if fault.victim == "command" else _pid(run / "resilience", fault.victim)
            if pid is not None and command.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, fault.signal)
                    injected += 1
        command.join(max(1.0, deadline - time.monotonic()))
        code = command.exitcode
        assert code is not None, log.read_text()
    finally:
        command.kill()
        command.join()
    events = run / "resilience" / "events.jsonl"
    told = [json.loads(line) for line in events.read_text().splitlines()] if events.is_file() else []
    return Ended(code, losses(run), told, log.read_text(), injected)


@contextlib.contextmanager
def slowed(run: Path, victim: str, after_step: int, works: float = 0.02, stands: float = 0.04) -> Iterator[None]:
    """From step `after_step` on, let a process work for `works` and stop it for `stands` seconds, repeatedly."""
    ended = threading.Event()

    def pace() -> None:
        while len(losses(run)) < after_step and not ended.wait(0.01):
            pass
        pid = _pid(run / "resilience", victim)
        while pid is not None and not ended.wait(works):
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stands)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    thread = threading.Thread(target=pace, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def losses(run: Path) -> list[float]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]  # others are evaluations
    except (FileNotFoundError, json.JSONDecodeError):
        return []


def _step_seconds(run: Path) -> float:
    """Seconds of the last step, 0 before the first."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if losses(run) else []
    return next((record["step_seconds"] for line in lines[::-1] if "loss" in (record := json.loads(line))), 0.0)


def _command(start: Callable[[], object], folder: Path, log: Path, arguments: tuple[str, ...]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # which the fork server blocks
    os.chdir(folder)
    with log.open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    sys.argv = ["dilatant", *arguments]
    start()


def _pid(folder: Path, victim: str) -> int | None:
    kind, _, node = victim.partition(":")
    name = "coordinator.pid" if kind == "coordinator" else f"node{node}.json"
    try:
        document = json.loads((folder / name).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if kind == "coordinator":
        return int(document)
    return int(document["pid"] if kind == "agent" else document["workers"]["0"])
