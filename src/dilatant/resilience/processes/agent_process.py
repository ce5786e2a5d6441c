"""Agent process of a node: it connects the coordinator with the node's workers, and ends workers that hang."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dilatant.comm.wire.link import Connections, LinkClosed, Received, WireLink, listen
from dilatant.config.files.durable import write_durably
from dilatant.resilience.processes.coordinator_process import known_record
from dilatant.resilience.processes.messages import MESSAGES, Hello, Job, JobRequest, StoreAt, Warm, connect
from dilatant.resilience.processes.process import ProcessStart, end_with_parent, read_start
from dilatant.resilience.protocol.agent import Agent, Command, Died, End, Event
from dilatant.resilience.protocol.values import Order

DIAL_SECONDS = 10.0
NO_COORDINATOR = "no coordinator answers any more"
LEAVE_SECONDS = 2.0
"""Time for workers to end by themselves when the run is over for them."""


SILENT_LEASES = 2
"""Leases without a heartbeat after which a worker is lost; normal work may block its interpreter for a while."""


class NodeProcesses(msgspec.Struct, frozen=True):
    """The processes of a node, which its agent writes to the run folder. workers: index → process id."""

    node: str
    pid: int
    workers: dict[int, int]
    host: str = msgspec.field(default_factory=socket.gethostname)


class AgentService:
    """Serves one node until the run is over or continues without the node.

    ended_worker: returns the index of a worker whose process has exited, even before it connected. ended: the reason
    why service ended; is_out: the run continues. leaves: the node has been requested to leave.
    """

    def __init__(self, start: ProcessStart, ended_worker: Callable[[], int | None] = lambda: None) -> None:
        self._start = start
        self._ended_worker = ended_worker
        self._token = bytes.fromhex(start.token)
        listener = listen("127.0.0.1")
        self.port: int = listener.getsockname()[1]
        self._agent = Agent(start.node, start.settings, start.workers)
        self._connections = Connections(listener, self._token, MESSAGES)
        self._is_alone = threading.Event()
        self._is_alone.set()
        self._workers: dict[int, WireLink] = {}
        self._pids: dict[int, int] = {}
        self._warm: set[int] = set()
        self._last_heard: dict[int, float] = {}
        self._coordinator: WireLink | None = None
        self._leaders = [(start.host, start.port)]
        job = start.job
        if job is not None and job.next_address is not None and job.next_address not in self._leaders:
            self._leaders.append(job.next_address)
        self._store_at = None if job is None else (start.host, job.store_port)
        self._leader_host = start.host
        self._leader_heard = time.monotonic()
        self._reported = 0.0
        self._record_read = time.monotonic()
        self._alone_since: float | None = None
        self._is_asked_to_leave = threading.Event()
        self.leaves = False
        self.ended = ""
        self.is_out = False

    def serve(self) -> None:
        """Run the agent. Never raises; the workers always end with this method."""
        beat = self._start.settings.lease_seconds / 4
        while len(self._warm) < self._start.workers and not self._agent.status().failed:
            for heard in self._connections.wait(beat):
                self._hear(heard)
            self._miss_ended()
        self._introduce()
        threading.Thread(target=self._stay_connected, name="coordinator", daemon=True).start()
        while not (self._agent.ended or self.ended or self._misses_coordinator()):
            for heard in self._connections.wait(beat / 2):
                self._hear(heard)
            if self._agent.changed:
                self._report()  # a step may wait for it
            if self._is_asked_to_leave.is_set():
                self._is_asked_to_leave.clear()
                self._agent.leave()
            self._agent.tick(time.monotonic())
            self._miss_silent()
            self._miss_ended()
            self._miss_leader()
            self._miss_end()
            if self._agent.changed or time.monotonic() - self._reported > beat:
                self._report()
        self.ended, self.is_out = self._agent.ended or self.ended or NO_COORDINATOR, self._agent.is_out
        self._end_workers()

    @property
    def was_member(self) -> bool:
        """True if this node was a member of any generation."""
        return self._agent.generation > 0

    def leave(self) -> None:
        """Let this node leave at the end of the step; may be called from any thread or a signal handler."""
        self.leaves = True
        self._is_asked_to_leave.set()

    def _misses_coordinator(self) -> bool:
        if self._coordinator is not None or not self._start.patience_seconds:
            self._alone_since = None
            return False
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        return now - self._alone_since > self._start.patience_seconds

    def _introduce(self) -> None:
        """Write the node's process ids to the run folder, for `dilatant status`."""
        if self._start.folder:
            processes = NodeProcesses(self._start.node, os.getpid(), self._pids)
            path = Path(self._start.folder) / f"{self._start.node}.json"
            write_durably(path, msgspec.json.encode(processes).decode() + "\n")

    def _hear(self, received: Received) -> None:
        link, message = received.link, received.message
        if link is self._coordinator:
            self._leader_heard = time.monotonic()
            if isinstance(message, Job):
                self._follow(self._leader_host, message.store_port)
            elif isinstance(message, Order):
                self._give(self._agent.obey(message, time.monotonic()))
            elif message is None:
                self._coordinator = None
                self._record_read = -math.inf  # a coordinator writes that the run is over before it closes connections
                self._is_alone.set()
            return
        if isinstance(message, Hello):
            if message.index in self._workers or not 0 <= message.index < self._start.workers:
                self._connections.drop(link)
                return
            self._workers[message.index] = link
            self._pids[message.index] = message.pid
            return
        worker = next((index for index, own in self._workers.items() if own is link), None)
        if worker is None:
            self._connections.drop(link)
            return
        if isinstance(message, Warm):
            self._warm.add(worker)
        if worker in self._warm:
            self._last_heard[worker] = time.monotonic()
        if message is None:
            self._give(self._agent.on_event(worker, Died(f"its worker {worker} is gone")))
        elif isinstance(message, Event):
            self._give(self._agent.on_event(worker, message))

    def _miss_silent(self) -> None:
        """Report a worker as dead if its process is stopped, or its interpreter was blocked for too long."""
        limit = time.monotonic() - SILENT_LEASES * self._start.settings.lease_seconds
        for worker, heard in self._last_heard.items():
            if heard < limit and not self._agent.ended:
                self._last_heard[worker] = math.inf
                self._give(self._agent.on_event(worker, Died(f"its worker {worker} is silent")))

    def _miss_ended(self) -> None:
        worker = self._ended_worker()
        if worker is not None:
            self._give(self._agent.on_event(worker, Died(f"its worker {worker} has ended")))

    def _miss_leader(self) -> None:
        """Disconnect from an unresponsive leader: a lost machine closes no connection, a running one repeats orders."""
        link, job = self._coordinator, self._start.job
        if link is None or job is None or len(self._leaders) == 1 or not self._agent.generation:
            return
        # A restarted coordinator sends nothing before all members are back, or `return_seconds` have passed.
        if time.monotonic() - self._leader_heard > job.leader_patience_seconds + job.settings.return_seconds:
            self._connections.drop(link)
            self._hear(Received(link, None))

    def _miss_end(self) -> None:
        """Check in the run folder if the run is over: no coordinator notifies a node that connects after the end."""
        now, lease = time.monotonic(), self._start.settings.lease_seconds
        if self._coordinator is not None or not self._start.folder or now - self._record_read < lease:
            return
        self._record_read = now
        self.ended = known_record(Path(self._start.folder)).stopped
        if self.ended:
            self._give([End(self.ended)])

    def _follow(self, host: str, port: int) -> None:
        """Send the workers the address of the new leader's store."""
        if self._store_at != (host, port):
            self._store_at = host, port
            self._give([StoreAt(host, port)])

    def _give(self, commands: Sequence[Command | StoreAt]) -> None:
        for command in commands:
            for link in self._workers.values():
                with suppress(LinkClosed):
                    link.send(command)

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self._coordinator is not None:
            with suppress(LinkClosed):
                self._coordinator.send(self._agent.status())

    def _end_workers(self) -> None:
        """Kill the workers that have not exited when ordered to, such as those with a blocked interpreter."""
        deadline = time.monotonic() + LEAVE_SECONDS
        is_out = self._agent.status().failed or not self._agent.status().done
        if not is_out:
            return  # they end by themselves
        while time.monotonic() < deadline and any(map(_is_alive, self._pids.values())):
            time.sleep(0.02)
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stay_connected(self) -> None:
        """Connect to the coordinator, after a restart again, or to the standby's coordinator."""
        place = 0
        while True:
            self._is_alone.wait()
            host, port = self._leaders[place]
            try:
                link = connect(host, port, self._token, DIAL_SECONDS)
                if len(self._leaders) > 1:
                    link.send(JobRequest())  # the answer says where its store is
            except (OSError, ValueError):
                place = (place + 1) % len(self._leaders)
                time.sleep(0.05)
                continue
            self._is_alone.clear()
            self._leader_host, self._leader_heard = host, time.monotonic()
            self._coordinator = link
            self._agent.changed = True
            self._connections.add(link)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def main() -> None:
    """Run the agent as configured on standard input, which closes when the parent process ends."""
    start = read_start()
    end_with_parent()
    service = AgentService(start)
    signal.signal(signal.SIGTERM, lambda *_: service.leave())
    print(service.port, flush=True)
    service.serve()


if __name__ == "__main__":
    main()
