"""Launch a resilient run on one machine: its workers, one agent per node, and the coordinator."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dilatant.comm.launch import WorkerFailed, launch_local
from dilatant.comm.store.token import fresh_token
from dilatant.config import Config, UserError
from dilatant.config.files.durable import write_durably
from dilatant.plan.plan import Plan
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import warn
from dilatant.report.text.wording import counted
from dilatant.resilience.history import PAGE, TRACE, write_history
from dilatant.resilience.processes.coordinator_process import STATE, read_record
from dilatant.resilience.processes.process import TOO_FEW_EXIT_CODE, Child, ProcessStart
from dilatant.resilience.protocol.values import TOO_FEW, Record, Settings
from dilatant.resilience.worker.rank import FOLDER, Seat, train_rank_resiliently
from dilatant.training.checkpoints.starting_point import StartingPoint as StartingPoint
from dilatant.training.rank import RunResult, Show, console_for

COORDINATOR = "dilatant.resilience.processes.coordinator_process"
AGENT = "dilatant.resilience.processes.agent_process"
WATCH_SECONDS = 0.05
LAST_SECONDS = 2.0
RESTART_SECONDS = 1.0
"""Delay before a lost node is restarted: an immediate start would take CPU cores from the recovery."""
BETWEEN_STARTS_SECONDS, UNATTENDED_SECONDS = 0.25, 30.0
"""Pause between restarts of a coordinator that exits at once (port in use, disk full), and limit for all restarts."""


def launch_resiliently(
    config: Config,
    ranks: int,
    plan_json: str,
    start: StartingPoint,
    show: Show,
    started: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train in `ranks` processes of this machine; returns the result of the final first rank.

    Raises UserError or WorkerFailed, see `launch_local`.
    """
    warn_of_few_copies(config, plan_json, show)
    folder = fresh_folder(config)
    per_node = config.resilience.ranks_per_node
    counts = [min(per_node, ranks - first) for first in range(0, ranks, per_node)]
    with _agents(config, counts, folder) as (seats, supervisor):
        try:
            results = launch_local(
                train_rank_resiliently,
                ranks,
                config,
                plan_json,
                start,
                show,
                seats,
                started=started,
                newcomers=lambda: [
                    (rank, (config, plan_json, start, show, again)) for rank, again in supervisor.restarted()
                ],
            )
        except WorkerFailed as failure:
            write_history(folder.parent, config.output_dir)
            if supervisor.failure:
                raise WorkerFailed(f"the run stopped: {supervisor.failure}") from failure
            record = known_record(folder)
            if record is None or not record.stopped:
                raise
            raise stopped_error(record) from failure
    write_history(folder.parent, config.output_dir)
    record = known_record(folder)
    if record is not None and TOO_FEW in record.stopped:
        raise stopped_error(record)
    finished = [result for result in results if result is not None]
    return next((result for result in finished if result.is_first), finished[0])


def stopped_error(record: Record) -> WorkerFailed:
    """Return the error of a run that stopped early, with the exit code that tells a scheduler whether to retry."""
    code = TOO_FEW_EXIT_CODE if TOO_FEW in record.stopped else 1
    return WorkerFailed(f"the run stopped: {record.stopped}", exit_code=code)


def fresh_folder(config: Config) -> Path:
    """Empty the folder of the coordinator's record, but keep the term number: agents of an earlier start that still
    look for their coordinator connect to this one, and obey only greater terms. Raises UserError."""
    folder = RunFolder(config.output_dir).path / FOLDER
    before = known_record(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for shown in (PAGE, TRACE):
        (folder.parent / shown).unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True)
        if before is not None:
            write_durably(folder / STATE, msgspec.json.encode(Record(term=before.term)).decode() + "\n")
    except OSError as error:
        raise UserError(f"{str(folder)!r} cannot be made: {error.strerror}") from None
    return folder


def settings_of(config: Config, nodes: int) -> Settings:
    """Return the protocol settings of a run that begins with `nodes` nodes."""
    given = config.resilience
    return Settings(
        lease_seconds=given.lease_seconds,
        fence_seconds=given.fence_seconds,
        build_seconds=given.progress_seconds,
        drain_seconds=given.drain_seconds,
        initial=nodes,
        fewest=given.fewest_nodes,
    )


def warn_of_few_copies(config: Config, plan_json: str, show: Show) -> None:
    copies = config.resilience.fault_tolerance + 1
    found = copies_on_nodes(Plan.from_json(plan_json), config.resilience.ranks_per_node)
    few = [f"{unit} on {counted(count, 'node')}" for unit, count in found.items() if count < copies]
    if few:
        warn(
            console_for(show),
            f"some layers have too few copies: {', '.join(few)}, and resilience.fault_tolerance {copies - 1} asks for "
            f"{copies}; losing as many nodes may send the run back to its newest checkpoint. More replicas help, and "
            f"`dilatant plan --fault-tolerance {copies - 1}` finds a plan",
        )


@contextlib.contextmanager
def _agents(config: Config, counts: list[int], folder: Path) -> Iterator[tuple[list[Seat], _Supervisor]]:
    """Start the coordinator and an agent per node with `counts` workers; yields all seats and the supervisor."""
    settings = settings_of(config, len(counts))
    token = fresh_token()
    coordinator = Child(COORDINATOR, ProcessStart("127.0.0.1", 0, token.hex(), settings, str(folder)))
    agents: list[Child] = []
    supervisor: _Supervisor | None = None
    try:
        port = _port(coordinator)
        for node, count in enumerate(counts):
            begin = ProcessStart("127.0.0.1", port, token.hex(), settings, str(folder), f"node{node}", count)
            agents.append(Child(AGENT, begin))
        seats = [
            Seat(f"node{node}", index, _port(agent), token)
            for node, (agent, count) in enumerate(zip(agents, counts))
            for index in range(count)
        ]
        restart = ProcessStart("127.0.0.1", port, token.hex(), settings, str(folder))
        supervisor = _Supervisor(coordinator, restart, agents, seats, config.resilience.restarts)
        yield seats, supervisor
    finally:
        if supervisor is not None:
            coordinator = supervisor.close()
        deadline = time.monotonic() + LAST_SECONDS
        for child in (*agents, coordinator):
            child.close(max(0.0, deadline - time.monotonic()))


class _Supervisor:
    """Restarts the coordinator when it dies, kills the workers of an agent that dies, and restarts lost nodes."""

    def __init__(
        self, coordinator: Child, restart: ProcessStart, agents: list[Child], seats: list[Seat], restarts: int
    ) -> None:
        self._coordinator = coordinator
        self._restart = restart
        self._agents = agents
        self._seats = seats
        self._restarts = restarts
        self._restarted: queue.SimpleQueue[tuple[int, list[Seat]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._began = self._stood = time.monotonic()
        self.failure = ""
        """The reason why the run cannot continue, if the coordinator is the cause."""
        self._thread = threading.Thread(target=self._run, name="dilatant-supervisor", daemon=True)
        self._thread.start()

    def close(self) -> Child:
        """Stop supervising; returns the current coordinator."""
        self._closed.set()
        self._thread.join()
        return self._coordinator

    def restarted(self) -> list[tuple[int, list[Seat]]]:
        """Return the ranks whose processes must be restarted, each with the seats of all ranks."""
        found = []
        while not self._restarted.empty():
            found.append(self._restarted.get())
        return found

    def _begin_again(self, node: int, name: str) -> None:
        """Start a new agent, and request its workers, under a node name that was never used."""
        ranks = [rank for rank, seat in enumerate(self._seats) if seat.node.partition(".")[0] == name]
        token = bytes.fromhex(self._restart.token)
        start = replace(self._restart, node=f"{name}.{self._restarts}", workers=len(ranks))
        agent = self._agents[node] = Child(AGENT, start)
        for index, rank in enumerate(ranks):
            self._seats[rank] = Seat(start.node, index, agent.port, token)
        for rank in ranks:
            self._restarted.put((rank, list(self._seats)))

    def _watch_coordinator(self) -> None:
        """Replace a coordinator that has died or hangs; if none can be started in UNATTENDED_SECONDS, end the run."""
        now = time.monotonic()
        if self._coordinator.is_alive:
            if not self._coordinator.stands_still():
                self._stood = now if self._coordinator.has_answered else self._stood
                return
            self._coordinator.process.kill()
            self._coordinator.process.wait()
        elif not self._coordinator.process.returncode or self.failure:  # the run is over
            return
        elif now - self._stood > UNATTENDED_SECONDS:
            self.failure = (
                f"no coordinator could be started for {UNATTENDED_SECONDS:.0f} s (what it wrote is above); "
                "`dilatant resume` goes on from the newest checkpoint"
            )
            _kill(list(range(len(self._seats))))
            return
        elif now - self._began < BETWEEN_STARTS_SECONDS:
            return
        self._coordinator.close()
        self._coordinator = Child(COORDINATOR, self._restart)
        self._began = time.monotonic()

    def _run(self) -> None:
        ended_at: dict[int, float] = {}
        while not self._closed.wait(WATCH_SECONDS):
            self._watch_coordinator()
            for node, agent in enumerate(self._agents):
                if agent.is_alive:
                    continue
                ranks = [
                    rank
                    for rank, seat in enumerate(self._seats)
                    if seat.node.partition(".")[0] == f"node{node}"
                ]
                if node not in ended_at:
                    ended_at[node] = time.monotonic()
                    if agent.process.returncode:
                        _kill(ranks)
                if not self._restarts or time.monotonic() - ended_at[node] < RESTART_SECONDS:
                    continue
                record = known_record(Path(self._restart.folder))
                if record is not None and not record.stopped:
                    self._restarts -= 1
                    agent.close()
                    _join(ranks)
                    self._begin_again(node, f"node{node}")
                    del ended_at[node]


def _port(child: Child) -> int:
    """Return a child's port. Raises UserError where it could not start; its output says why."""
    try:
        return child.port
    except RuntimeError as error:
        raise UserError(f"resilience.enabled: {error}; what it wrote is above") from None


def known_record(folder: Path) -> Record | None:
    """Return the last coordinator's record, or None if it cannot be read."""
    try:
        return read_record(folder)
    except (OSError, ValueError):
        return None


def _kill(ranks: list[int]) -> None:
    for worker in _processes(ranks):
        worker.kill()


def _join(ranks: list[int]) -> None:
    for worker in _processes(ranks):
        worker.join(LAST_SECONDS)


def _processes(ranks: list[int]) -> list[Any]:
    names = {f"dilatant-{rank}" for rank in ranks}
    return [process for process in multiprocessing.active_children() if process.name in names]
