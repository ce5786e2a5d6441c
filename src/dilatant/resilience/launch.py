"""Train as configured: fail with the first lost rank, or recover from losses, on this machine or several machines.

A run that recovers has one coordinator, which is started here, and an agent per node: this machine starts its own, and
other machines' agents connect.
"""

from __future__ import annotations

import multiprocessing
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dilatant.comm.errors import WorkerFailed
from dilatant.comm.launch import launch_local
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.token import fresh_token
from dilatant.config import Config, UserError
from dilatant.config.environment import place_from
from dilatant.config.files.durable import write_durably
from dilatant.plan.plan import Plan
from dilatant.plan.templates.copies import copies_on_nodes
from dilatant.report.run_folder import RunFolder
from dilatant.report.say import warn
from dilatant.report.text.wording import counted
from dilatant.resilience.machines import (
    LEADER_LAST_SECONDS,
    LOOPBACK,
    ArrivingMachines,
    LaunchedMachines,
    LeaderAddresses,
    Machines,
)
from dilatant.resilience.processes.agent_run import coordinator_port, launched_agent, run_agent
from dilatant.resilience.processes.coordinator_process import STATE, known_record
from dilatant.resilience.processes.messages import Job, Seat, TrainingStart, is_loopback
from dilatant.resilience.processes.process import AGENT, TOO_FEW_EXIT_CODE, Child, ProcessStart
from dilatant.resilience.processes.supervisor import CoordinatorSupervisor
from dilatant.resilience.protocol.values import ASKED, Record, Settings, Task, may_resume
from dilatant.resilience.ray_machines import RayMachines
from dilatant.resilience.status import PAGE, TRACE, read_events, write_history
from dilatant.resilience.worker.rank import FOLDER, train_rank_resiliently
from dilatant.resilience.worker.worker_process import RESULT
from dilatant.training.checkpoints.starting_point import StartingPoint as StartingPoint
from dilatant.training.rank import RunResult, Show, console_for
from dilatant.training.run import Resilient
from dilatant.training.run import train as train_once

WATCH_SECONDS = 0.05
LAST_SECONDS = 2.0
RESTART_SECONDS = 1.0
"""Delay before a lost node is restarted: an immediate start would take CPU cores from the recovery."""


def train_as_configured(config: Config, *, overwrite: bool = False, show: Show = "nothing") -> RunResult:
    """Train in ranks that fail together or, with `resilience.enabled`, recover from losses; see `dilatant.train`."""
    if not config.resilience.enabled:
        return train_once(config, overwrite=overwrite, show=show)
    place, address = place_from(), config.resilience.address
    if place is None and address is None and config.launcher is None:
        if config.resilience.standby is not None:
            raise UserError(
                "resilience.standby: the run is on one machine, so there is nobody to lead it when that is gone; leave "
                "it out, or set resilience.listen"
            )
        return train_once(config, overwrite=overwrite, show=show, resilient=Resilient(launch_resiliently))
    if config.python:
        raise UserError(
            "resilience over several machines starts workers from the run's config, which cannot hold what Python "
            f"passed ({', '.join(config.python)}): use files and dotted names (train.loss, train.callbacks, "
            "train.optimizer, train.schedule, evaluation.metrics), one machine, or no resilience"
        )
    if config.launcher is not None:
        if place is not None:
            raise UserError(
                f"launcher: {config.launcher!r} starts the ranks itself, but {place.launcher} started {place.size} "
                "processes; start one `dilatant train`, or leave 'launcher' out"
            )
        with closing(RayMachines(config)) as machines:
            resilient = _led(machines.leader, machines, config.cluster.nodes, "launcher: ray")
            return train_once(config, overwrite=overwrite, show=show, resilient=resilient)
    if place is None:
        assert address is not None
        leader = LeaderAddresses(*address, address[0])
        resilient = _led(leader, ArrivingMachines(), config.cluster.nodes, "resilience.listen")
    elif place.rank:
        code = run_agent(launched_agent(config, place))
        return RunResult(Path(config.output_dir), 0, 0, 0.0, code, is_first=False)
    else:
        leader = LeaderAddresses(place.host if is_loopback(place.host) else "", coordinator_port(place), place.host)
        resilient = Resilient(partial(run_leader, leader, LaunchedMachines()), place.size, place.launcher)
    return train_once(config, overwrite=overwrite, show=show, resilient=resilient)


def _led(leader: LeaderAddresses, machines: Machines, nodes: int, launcher: str) -> Resilient:
    return Resilient(partial(run_leader, leader, machines), nodes, launcher, is_awaited=True)


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
    with closing(_LocalNodes(config, counts, folder)) as nodes:
        try:
            results = launch_local(
                train_rank_resiliently,
                ranks,
                config,
                plan_json,
                start,
                show,
                nodes.seats,
                started=started,
                newcomers=lambda: [
                    (rank, (config, plan_json, start, show, seats)) for rank, seats in nodes.restarted()
                ],
            )
        except WorkerFailed as failure:
            write_history(folder.parent, config.output_dir)
            if nodes.coordinator.failure:
                raise WorkerFailed(f"the run stopped: {nodes.coordinator.failure}") from failure
            record = known_record(folder)
            if not record.stopped:
                raise
            raise stopped_error(record) from failure
    write_history(folder.parent, config.output_dir)
    record = known_record(folder)
    if is_saved_early(record):
        raise stopped_error(record)
    finished = [result for result in results if result is not None]
    return of_whole_run(next((result for result in finished if result.is_first), finished[0]), folder)


def run_leader(
    leader: LeaderAddresses,
    machines: Machines,
    config: Config,
    ranks: int,
    plan_json: str,
    start: StartingPoint,
    show: Show,
    started: Callable[[Callable[[], None]], None],
) -> RunResult:
    """Train in `ranks` processes of `machines`, whose agents connect here; returns the result of the final first rank.

    started: called with a function that makes the run save and end. Store and coordinator run here, so the run ends
    with this process. Raises UserError, or WorkerFailed when no rank can continue.
    """
    warn_of_few_copies(config, plan_json, show)
    folder = fresh_folder(config)
    token = machines.token
    workers = config.resilience.ranks_per_node
    count = ranks // workers
    settings = settings_of(config, count)
    with ExitStack() as stack:
        store = StoreServer(LOOPBACK if is_loopback(leader.host) else "", 0, token)
        stack.callback(store.close)
        checkpoint = "" if start.checkpoint is None else str(start.checkpoint.absolute())
        job = Job(
            TrainingStart(config.to_yaml(), plan_json, checkpoint, start.discards, show),
            store.port,
            is_loopback(leader.host),
            workers,
            config.resilience.restarts,
            str(folder.absolute()),
            settings,
            config.resilience.standby or "",
        )
        coordinator = CoordinatorSupervisor(
            ProcessStart(leader.host, leader.port, token.hex(), settings, str(folder), job=job)
        )
        stack.callback(coordinator.close, LEADER_LAST_SECONDS)
        try:
            leader = replace(leader, port=coordinator.await_port())
        except RuntimeError:
            raise UserError(
                f"the coordinator cannot listen at {leader.host}:{leader.port}; name another port "
                "(resilience.listen, or MASTER_PORT under a launcher)"
            ) from None
        stack.callback(machines.close)
        machines.start(leader, count, console_for(show))
        started(coordinator.end)
        while not (record := known_record(folder)).stopped:
            time.sleep(WATCH_SECONDS)
            if coordinator.watch() and coordinator.failure:
                raise WorkerFailed(f"the run stopped: {coordinator.failure}")
            machines.watch(has_begun=record.generation > 0)
    write_history(folder.parent, config.output_dir)
    result = _read_result(folder)
    if result is None or is_saved_early(record):
        raise stopped_error(record)
    return of_whole_run(result, folder)


def _read_result(folder: Path) -> RunResult | None:
    """Read the first rank's result; None where no rank reached the end. Raises ValueError for an invalid file."""
    try:
        text = (folder / RESULT).read_bytes()
        return msgspec.json.decode(text, type=RunResult, dec_hook=lambda kind, value: kind(value))
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder / RESULT}: {error}") from None


def of_whole_run(result: RunResult, folder: Path) -> RunResult:
    """Return the result of the last generation with the steps and seconds of all generations."""
    events = tuple(read_events(folder.parent))
    began = next((event for event in events if event.task == Task.RUN), None)
    if began is None:
        return result
    seconds = max(0.0, events[-1].time - began.time)
    since = time.monotonic() - max(0.0, time.time() - began.time)
    return replace(result, began_at=began.step, seconds=seconds, training_began=since)


def is_saved_early(record: Record) -> bool:
    """Return True if the run could not go on, and saved what it had."""
    return record.stopped not in ("", ASKED) and may_resume(record.stopped)


def stopped_error(record: Record) -> UserError | WorkerFailed:
    """Return the error of a run that stopped early. If the run was saved, it has the exit code that tells a scheduler
    to retry; else it is the user's mistake that ended the run, if there is one."""
    mistake = record.stopped.partition("UserError: ")[2]
    if mistake and not is_saved_early(record):
        return UserError(mistake)
    code = TOO_FEW_EXIT_CODE if is_saved_early(record) else 1
    return WorkerFailed(f"the run stopped: {record.stopped}", exit_code=code)


def fresh_folder(config: Config) -> Path:
    """Empty the folder of the coordinator's record, but keep the term number. Agents of an earlier start that still
    look for their coordinator connect to this one, and obey only greater terms. Raises UserError."""
    folder = RunFolder(config.output_dir).path / FOLDER
    before = known_record(folder)
    shutil.rmtree(folder, ignore_errors=True)
    for shown in (PAGE, TRACE):
        (folder.parent / shown).unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True)
        if before.term:
            write_durably(folder / STATE, msgspec.json.encode(Record(term=before.term)).decode() + "\n")
    except OSError as error:
        raise UserError(f"{str(folder)!r} cannot be made: {error.strerror}") from None
    return folder


def settings_of(config: Config, nodes: int) -> Settings:
    """Return the protocol settings of a run that begins with `nodes` nodes."""
    limits = config.resilience
    return Settings(
        lease_seconds=limits.lease_seconds,
        fence_seconds=limits.fence_seconds,
        build_seconds=limits.progress_seconds,
        drain_seconds=limits.drain_seconds,
        initial=nodes,
        fewest=limits.fewest_nodes,
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


class _LocalNodes:
    """The nodes of a run on one machine: the coordinator and one agent per node, each kept running by one thread.

    The thread kills the workers of an agent that dies, and restarts lost nodes. counts: workers of each node. seats: of
    all ranks; a restarted node gets new ones.
    """

    def __init__(self, config: Config, counts: Sequence[int], folder: Path) -> None:
        token, settings = fresh_token(), settings_of(config, len(counts))
        start = ProcessStart(LOOPBACK, 0, token.hex(), settings, str(folder))
        self.coordinator = CoordinatorSupervisor(start)
        self.seats: list[Seat] = []
        self._token, self._folder = token, folder
        self._agents: list[Child] = []
        self._restarts = config.resilience.restarts
        self._restarted: queue.SimpleQueue[tuple[int, list[Seat]]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dilatant-supervisor", daemon=True)
        self._ranks = [range(sum(counts[:node]), sum(counts[: node + 1])) for node in range(len(counts))]
        try:
            self._start = replace(start, port=self.coordinator.await_port())
            self._agents += [self._agent(node, f"node{node}") for node in range(len(counts))]
            for node in range(len(counts)):
                self.seats += self._seats_of(node, f"node{node}")
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise UserError(f"resilience.enabled: {error}; what it wrote is above") from None
            raise
        self._thread.start()

    def close(self) -> None:
        """End supervision, then agents and coordinator."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        deadline = time.monotonic() + LAST_SECONDS
        for agent in self._agents:
            agent.close(max(0.0, deadline - time.monotonic()))
        self.coordinator.close(max(0.0, deadline - time.monotonic()))

    def restarted(self) -> list[tuple[int, list[Seat]]]:
        """Return the ranks whose processes must be restarted, each with the seats of all ranks."""
        found = []
        while not self._restarted.empty():
            found.append(self._restarted.get())
        return found

    def _agent(self, node: int, name: str) -> Child:
        return Child(AGENT, replace(self._start, node=name, workers=len(self._ranks[node])))

    def _seats_of(self, node: int, name: str) -> list[Seat]:
        port = self._agents[node].port
        return [Seat(name, index, port, self._token) for index in range(len(self._ranks[node]))]

    def _restart(self, node: int) -> None:
        """Start a new agent, and request its workers, under a node name that was never used."""
        self._restarts -= 1
        self._agents[node].close()
        for worker in _processes(self._ranks[node]):
            worker.join(LAST_SECONDS)
        name = f"node{node}.{self._restarts}"
        self._agents[node] = self._agent(node, name)
        ranks = self._ranks[node]
        self.seats[ranks.start : ranks.stop] = self._seats_of(node, name)
        for rank in ranks:
            self._restarted.put((rank, list(self.seats)))

    def _run(self) -> None:
        ended_at: dict[int, float] = {}
        while not self._closed.wait(WATCH_SECONDS):
            if self.coordinator.watch() and self.coordinator.failure:
                _kill(range(len(self.seats)))
            for node, agent in enumerate(self._agents):
                if agent.is_alive:
                    continue
                if node not in ended_at:
                    ended_at[node] = time.monotonic()
                    if agent.process.returncode:
                        _kill(self._ranks[node])
                if not self._restarts or time.monotonic() - ended_at[node] < RESTART_SECONDS:
                    continue
                record = known_record(self._folder)
                if record.term and not record.stopped:
                    self._restart(node)
                    del ended_at[node]


def _kill(ranks: Sequence[int]) -> None:
    for worker in _processes(ranks):
        worker.kill()


def _processes(ranks: Sequence[int]) -> list[Any]:
    names = {f"dilatant-{rank}" for rank in ranks}
    return [process for process in multiprocessing.active_children() if process.name in names]
