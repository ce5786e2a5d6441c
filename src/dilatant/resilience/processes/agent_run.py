"""Machine agent: gets the run's description from the coordinator and starts this machine's ranks. Imports no torch."""

from __future__ import annotations

import itertools
import re
import secrets
import shlex
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dilatant.comm.store.token import REMEDY, shared_token
from dilatant.comm.wire.handshake import TokenMismatch
from dilatant.config.config import Config
from dilatant.config.environment import LaunchPlace
from dilatant.config.errors import UserError
from dilatant.config.printable import printable
from dilatant.resilience.processes.agent_process import NO_COORDINATOR, AgentService
from dilatant.resilience.processes.messages import Job, JobRequest, Seat, StoreAt, WorkerStart, connect
from dilatant.resilience.processes.process import TOO_FEW_EXIT_CODE, Child, ProcessStart
from dilatant.resilience.processes.standby import Standby
from dilatant.resilience.protocol.agent import End
from dilatant.resilience.protocol.values import ASKED, FINISHED, may_resume
from dilatant.training.stop_signal import StopSignal

WORKER = "dilatant.resilience.worker.worker_process"
PATIENCE_LEASES = 20
"""Leases that a machine waits for a lost coordinator; a restart, or a healed network, takes less."""
LOOK_SECONDS = 0.5
LAST_SECONDS = 10.0
"""Time for workers to end by themselves after the run."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of an agent. host, port: of the coordinator. name: readable name of this machine, by default its host
    name. wait_seconds: time limit for the coordinator to be reachable. notice_file: this node leaves when the file
    exists; notice_url: when the address answers 200. stands_by: this is the machine of `resilience.standby`."""

    host: str
    port: int
    name: str = ""
    wait_seconds: float = 600.0
    notice_file: Path | None = None
    notice_url: str | None = None
    stands_by: bool = False


def coordinator_port(place: LaunchPlace) -> int:
    """Return the leader's port under a launcher: the launcher's port, plus one if torchrun's own store uses that port.
    Raises UserError if the launcher started several processes on a machine."""
    if place.local_size > 1:
        raise UserError(
            f"{place.launcher} started {place.local_size} processes on this machine; with resilience.enabled start "
            "one, which starts resilience.ranks_per_node itself (Slurm: --ntasks-per-node=1)"
        )
    return place.port if place.hosts_store else place.port + 1


def launched_agent(config: Config, place: LaunchPlace) -> AgentOptions:
    """Return the options of a launched machine other than the first, the leader. Raises like `coordinator_port`."""
    stands_by = place.rank == 1 and config.resilience.standby is not None
    return AgentOptions(place.host, coordinator_port(place), stands_by=stands_by)


def run_agent(options: AgentOptions, token: bytes | None = None) -> int:
    """Run this machine's ranks in a run; returns an exit code when the run is over or continues without this machine.

    0: the run has finished, or an end of the run or of this node was requested. 75: try again later. token: default,
    the one that machines share. Raises UserError if no coordinator answers, or one with another token.
    """
    with ExitStack() as stack:
        return _rejoin_until_over(options, token or shared_token(), stack)


def _rejoin_until_over(options: AgentOptions, token: bytes, stack: ExitStack) -> int:
    name = re.sub(r"[^A-Za-z0-9_-]", "-", options.name or socket.gethostname())
    following: tuple[str, int] | None = None
    for attempt in itertools.count():
        try:
            job = _ask(options, token, options.wait_seconds if attempt == 0 else 0.0)
        except UserError:
            if attempt == 0:
                raise
            job = None  # it has ended meanwhile, or the leader is another machine
            if following is not None:
                options, following = replace(options, host=following[0], port=following[1]), None
                with suppress(UserError):
                    job = _ask(options, token, 0.0)
        if job is None:
            return TOO_FEW_EXIT_CODE
        if attempt == 0 and options.stands_by:
            if job.next_address is None:
                raise UserError("--standby: the run has no resilience.standby, this machine's HOST:PORT")
            stack.callback(Standby(job, options.host, options.port, token).close)
        following = job.next_address
        # A unique name: a lost node that returns is treated as a new node.
        service = _serve_as_node(options, job, f"node-{name}-{secrets.token_hex(3)}", token)
        if service.ended in (FINISHED, ASKED) or service.leaves:
            if not (service.was_member or service.leaves):
                print("this machine came too late: the run has ended", file=sys.stderr, flush=True)
            return 0
        if service.ended == NO_COORDINATOR:
            print(
                f"error: nobody leads the run any more ({options.host}:{options.port} is gone"
                f"{', and most machines with it' if job.standby else ''}); {_what_is_left(Path(job.folder).parent)}",
                file=sys.stderr,
                flush=True,
            )
        if not service.is_out:
            is_temporary = service.ended == NO_COORDINATOR or may_resume(service.ended)
            return TOO_FEW_EXIT_CODE if is_temporary else 1
        print(printable(f"this machine was left out: {service.ended}"), file=sys.stderr, flush=True)
        if attempt >= job.restarts:
            return 1
    raise AssertionError


def _what_is_left(run: Path) -> str:
    """Describe how to resume a run that has no leader any more."""
    names = (path.name for path in run.glob("checkpoints/step-*"))
    saved = [name for name in names if re.fullmatch(r"step-\d+", name)]  # others are of abandoned branches
    newest = max(saved, key=lambda name: int(name[5:]), default="its beginning, for nothing is saved")
    return f"`dilatant resume {shlex.quote(str(run))}` goes on from {newest}"


def _ask(options: AgentOptions, token: bytes, seconds: float) -> Job:
    """Request the run's description from the coordinator. Raises UserError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            link = connect(options.host, options.port, token)
            try:
                link.send(JobRequest())
                job = link.receive()
            finally:
                link.close()
            if isinstance(job, Job):
                return job
            reason = job.reason if isinstance(job, End) else "what answers there is none of ours"
            raise UserError(f"the run at {options.host}:{options.port} takes nobody: {reason}")
        except TokenMismatch:
            raise UserError(
                f"the coordinator at {options.host}:{options.port} refused this machine: their tokens differ; {REMEDY}"
            ) from None
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no coordinator answers at {options.host}:{options.port} within {seconds:g} s ({error}): "
                    "`dilatant train` did not start there, or a firewall is in between"
                ) from None
            time.sleep(0.2)


def _serve_as_node(options: AgentOptions, job: Job, node: str, token: bytes) -> AgentService:
    """Serve as a node until service ends; the workers have then exited."""
    workers: list[Child] = []

    def ended_worker() -> int | None:
        return next((index for index, each in enumerate(workers) if not each.is_alive), None)

    settings, patience = job.settings, 4 * job.leader_patience_seconds if job.standby else 0.0
    patience = max(PATIENCE_LEASES * settings.lease_seconds, patience)
    start = ProcessStart(
        options.host, options.port, token.hex(), settings, job.folder, node, job.workers, patience, job
    )
    service = AgentService(start, ended_worker)
    store_at = StoreAt(options.host, job.store_port)
    closed = threading.Event()
    # On SIGTERM or Ctrl-C the node leaves at the end of the step; a later signal acts as usual.
    with StopSignal(service.leave):
        threading.Thread(target=_watch_notice, args=(options, service, closed), daemon=True).start()
        deadline = 0.0
        try:
            for index in range(job.workers):
                seat = Seat(node, index, service.port, token, store_at, job.on_one_machine)
                workers.append(Child(WORKER, WorkerStart(job, seat), stdout=None))
            service.serve()
            deadline = time.monotonic() + LAST_SECONDS
        finally:
            closed.set()
            for each in workers:
                each.close(max(0.0, deadline - time.monotonic()))
    return service


def _watch_notice(options: AgentOptions, service: AgentService, closed: threading.Event) -> None:
    """Leave when the cloud announces, by a file or an address, that it will reclaim the machine."""
    while not closed.wait(LOOK_SECONDS):
        if (options.notice_file is not None and options.notice_file.exists()) or (
            options.notice_url is not None and _is_noticed(options.notice_url)
        ):
            service.leave()
            return


def _is_noticed(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as answer:
            return answer.status == 200
    except (OSError, ValueError, urllib.error.URLError):  # 404 where nothing is planned
        return False
