"""Leader of a run over several machines: it runs the store, the coordinator and, if it trains, an agent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dilatant.comm.launch import WorkerFailed
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.token import shared_token
from dilatant.config import Config, UserError
from dilatant.report.say import say
from dilatant.resilience.history import write_history
from dilatant.resilience.launch import (
    COORDINATOR,
    fresh_folder,
    known_record,
    settings_of,
    stopped_error,
    warn_of_few_copies,
)
from dilatant.resilience.processes.job import Job, is_loopback
from dilatant.resilience.processes.process import SUPERSEDED_EXIT_CODE, Child, ProcessStart
from dilatant.resilience.protocol.values import TOO_FEW, Record
from dilatant.resilience.run_result import read_result
from dilatant.training.checkpoints.starting_point import StartingPoint as StartingPoint
from dilatant.training.rank import RunResult, Show, console_for

WATCH_SECONDS = 0.1
LAST_SECONDS = 10.0
"""Time for the coordinator and the local agent to end after the run."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LeaderAddresses:
    """The leader's addresses. host, port: where the coordinator listens; host "" for all addresses. name: host name for
    others. trains_here: this machine also has ranks."""

    host: str
    port: int
    name: str
    trains_here: bool


def run_leader(
    leading: LeaderAddresses,
    config: Config,
    ranks: int,
    plan_json: str,
    start: StartingPoint,
    show: Show,
    started: Callable[[Callable[[], None]], None],
) -> RunResult:
    """Train in `ranks` processes of machines whose agents connect here; returns the result of the final first rank.

    started: called with a function that makes the run save and end. Store and coordinator run here, so the run ends
    with this process. Raises UserError, or WorkerFailed when no rank can continue.
    """
    warn_of_few_copies(config, plan_json, show)
    folder = fresh_folder(config)
    token = shared_token()
    workers = config.resilience.ranks_per_node
    settings = settings_of(config, ranks // workers)
    with contextlib.ExitStack() as stack:
        store = StoreServer(LOOPBACK if is_loopback(leading.host) else "", 0, token)
        stack.callback(store.close)
        job = Job(
            config.to_yaml(),
            plan_json,
            "" if start.checkpoint is None else str(start.checkpoint.absolute()),
            start.discards,
            store.port,
            is_loopback(leading.host),
            workers,
            config.resilience.restarts,
            str(folder.absolute()),
            show,
            settings,
            config.resilience.standby or "",
        )
        begin = ProcessStart(leading.host, leading.port, token.hex(), settings, str(folder), job=job)
        led = _CoordinatorSupervisor(_coordinator(begin), begin)
        stack.callback(led.close)
        agent = _own_agent(leading, stack) if leading.trains_here else None
        started(led.end)
        others = ranks // workers - leading.trains_here
        say(console_for(show), f"waits for {others} other machines at {leading.name}:{leading.port}")
        record = led.stopped(agent)
    write_history(folder.parent, config.output_dir)
    result = read_result(folder)
    if result is None or TOO_FEW in record.stopped:
        mistake = record.stopped.partition("UserError: ")[2]
        raise UserError(mistake) if mistake else stopped_error(record)
    return result


def _coordinator(start: ProcessStart) -> Child:
    """Start the coordinator. Raises UserError where it cannot listen."""
    child = Child(COORDINATOR, start)
    try:
        _ = child.port
    except RuntimeError:
        child.close()
        raise UserError(
            f"the coordinator cannot listen at {start.host}:{start.port}; name another port (resilience.listen, or "
            "MASTER_PORT under a launcher)"
        ) from None
    return child


def _own_agent(leading: LeaderAddresses, stack: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    host = leading.host if is_loopback(leading.host) else LOOPBACK
    agent = subprocess.Popen(
        [sys.executable, "-P", "-m", "dilatant", "agent", "--coordinator", f"{host}:{leading.port}"],
        start_new_session=True,  # Ctrl-C goes to this process, which makes all ranks end
    )

    def close() -> None:
        try:
            agent.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()

    stack.callback(close)
    return agent


class _CoordinatorSupervisor:
    """The coordinator process, restarted when it dies or hangs."""

    def __init__(self, child: Child, start: ProcessStart) -> None:
        self._child = child
        self._start = start
        self._folder = Path(start.folder)

    def end(self) -> None:
        """Ask all ranks to save and end."""
        self._child.process.terminate()

    def stopped(self, agent: subprocess.Popen[bytes] | None) -> Record:
        """Wait for the end of the run. Raises WorkerFailed where the local agent fails before the run begins."""
        while True:
            time.sleep(WATCH_SECONDS)
            record = known_record(self._folder)
            if record is not None and record.stopped:
                return record
            if self._child.stands_still():
                self._child.process.kill()
                self._child.process.wait()
            if not self._child.is_alive and self._child.process.returncode != SUPERSEDED_EXIT_CODE:
                self._child.close()
                self._child = Child(COORDINATOR, replace(self._start))
            begun = record is not None and record.generation > 0
            if agent is not None and not begun and agent.poll():
                raise WorkerFailed("this machine's agent has failed; what it said is above")

    def close(self) -> None:
        self._child.close(LAST_SECONDS)
