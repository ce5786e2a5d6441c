"""The agent of a node as a process: it knows the coordinator and its workers, and ends those that hang."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from dilatant.config.files.durable import write_durably
from dilatant.resilience.processes.coordinator_process import read_record
from dilatant.resilience.processes.job import Ask, Job
from dilatant.resilience.processes.process import Start, end_with_parent, read_start, say
from dilatant.resilience.processes.wire import (
    Connections,
    Hello,
    Link,
    LinkClosed,
    Received,
    StoreAt,
    Warm,
    connect,
    listen,
)
from dilatant.resilience.protocol.agent import Agent, Command, Died, Event
from dilatant.resilience.protocol.values import Order

DIAL_SECONDS = 10.0
NO_COORDINATOR = "no coordinator answers any more"
LEAVE_SECONDS = 2.0
"""What workers have to end by themselves when the run is over for them."""


SILENT_LEASES = 2
"""Leases that a worker may be silent: its interpreter may be held by something honest for a while."""


class Service:
    """One node's agent, until it is told that the run is over, or goes on without it.

    ended_worker: a worker whose process has ended, perhaps before it said anything. ended: why it has; is_out: whether
    the run goes on. leaves: whether it was asked to.
    """

    def __init__(self, start: Start, ended_worker: Callable[[], int | None] = lambda: None) -> None:
        self._start = start
        self._ended_worker = ended_worker
        self._token = bytes.fromhex(start.token)
        self._listener = listen("127.0.0.1")
        self.port: int = self._listener.getsockname()[1]
        self._agent = Agent(start.node, start.settings, start.workers)
        self._connections = Connections(self._listener, self._token)
        self._is_alone = threading.Event()
        self._is_alone.set()
        self._workers: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._warm: set[int] = set()
        self._last_heard: dict[int, float] = {}
        self._coordinator: Link | None = None
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
        """Raises nothing: whatever happens here, the workers end with it."""
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

    def leave(self) -> None:
        """Let this node go at the end of the step; from any thread or a signal."""
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
        """Say on disk which processes this node has, for whoever looks at the run."""
        if self._start.folder:
            document = {
                "node": self._start.node,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "workers": self._pids,
            }
            write_durably(Path(self._start.folder) / f"{self._start.node}.json", json.dumps(document) + "\n")

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
        """A worker that is stopped, or holds its interpreter for long, is as good as dead."""
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
        """A machine that is gone closes no connection; while the run goes on a coordinator repeats itself."""
        link, job = self._coordinator, self._start.job
        if link is None or job is None or len(self._leaders) == 1 or not self._agent.generation:
            return
        # One that has returned says nothing before all are back, or their time is over.
        if time.monotonic() - self._leader_heard > job.leader_patience_seconds + job.settings.return_seconds:
            self._connections.drop(link)
            self._hear(Received(link, None))

    def _miss_end(self) -> None:
        """Nobody answers a node that came, or came back, after the run's end; the run folder says so."""
        now, lease = time.monotonic(), self._start.settings.lease_seconds
        if self._coordinator is not None or not self._start.folder or now - self._record_read < lease:
            return
        self._record_read = now
        with suppress(OSError, ValueError):
            record = read_record(Path(self._start.folder))
            self.ended = "" if record is None else record.stopped

    def _follow(self, host: str, port: int) -> None:
        """Who leads now has a store of its own."""
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
        """They were told; who hangs, even one that holds the interpreter, ends now."""
        deadline = time.monotonic() + LEAVE_SECONDS
        is_out = self._agent.status().failed or not self._agent.status().done
        if not is_out:
            return  # they end when they are through
        while time.monotonic() < deadline and any(map(_is_alive, self._pids.values())):
            time.sleep(0.02)
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _stay_connected(self) -> None:
        """To the coordinator, also to one that has returned, or to the standby's."""
        place = 0
        while True:
            self._is_alone.wait()
            host, port = self._leaders[place]
            try:
                link = connect(host, port, self._token, DIAL_SECONDS)
                if len(self._leaders) > 1:
                    link.send(Ask())  # the answer says where its store is
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
    """Read how to start from standard input, whose end is that of whoever started this."""
    start = read_start()
    end_with_parent()
    service = Service(start)
    signal.signal(signal.SIGTERM, lambda *_: service.leave())
    say(port=service.port, pid=os.getpid())
    service.serve()


if __name__ == "__main__":
    main()
