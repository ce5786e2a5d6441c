"""The agent of a node as a process: it knows the coordinator and its workers, and ends those that hang."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dilatant.report.durable import write_durably
from dilatant.resilience.process import Start, end_with_parent, read_start, say
from dilatant.resilience.protocol.agent import Agent, Command, Died, Event
from dilatant.resilience.protocol.values import Order
from dilatant.resilience.wire import Hello, Link, LinkClosed, Warm, accept, connect, listen

LEAVE_SECONDS = 2.0
"""What workers have to end by themselves when the run is over for them."""


SILENT_LEASES = 2
"""Leases that a worker may be silent: its interpreter may be held by something honest for a while."""


@dataclass(frozen=True, slots=True)
class _Heard:
    worker: int | None
    """None: the coordinator."""
    message: Any
    """None: the link is closed."""


class Service:
    """One node's agent, until it is told that the run is over, or goes on without it."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._token = bytes.fromhex(start.token)
        self._listener = listen("127.0.0.1")
        self.port: int = self._listener.getsockname()[1]
        self._agent = Agent(start.node, start.settings, start.workers)
        self._heard: queue.Queue[_Heard] = queue.Queue()
        self._workers: dict[int, Link] = {}
        self._pids: dict[int, int] = {}
        self._warm: set[int] = set()
        self._last_heard: dict[int, float] = {}
        self._coordinator: Link | None = None
        self._reported = 0.0
        self._leaves = threading.Event()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def serve(self) -> None:
        """Raises nothing: whatever happens here, the workers end with it."""
        beat = self._start.settings.lease_seconds / 4
        while len(self._warm) < self._start.workers and not self._agent.status().failed:
            self._hear(self._heard.get())
        self._introduce()
        threading.Thread(target=self._stay_connected, name="coordinator", daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: self._leaves.set())
        while not self._agent.ended:
            with suppress(queue.Empty):
                self._hear(self._heard.get(timeout=beat / 2))
            if self._leaves.is_set():
                self._leaves.clear()
                self._agent.leave()
            self._agent.tick(time.monotonic())
            self._miss_silent()
            if self._agent.changed or time.monotonic() - self._reported > beat:
                self._report()
        self._end_workers()

    def _introduce(self) -> None:
        """Say on disk which processes this node has, for whoever looks at the run."""
        if self._start.folder:
            document = {"node": self._start.node, "pid": os.getpid(), "workers": self._pids}
            write_durably(Path(self._start.folder) / f"{self._start.node}.json", json.dumps(document) + "\n")

    def _hear(self, heard: _Heard) -> None:
        if heard.worker is None:
            if isinstance(heard.message, Order):
                self._give(self._agent.obey(heard.message, time.monotonic()))
            elif heard.message is None:
                self._coordinator = None
            else:
                self._coordinator = heard.message
            return
        if isinstance(heard.message, Warm):
            self._warm.add(heard.worker)
        if heard.worker in self._warm:
            self._last_heard[heard.worker] = time.monotonic()
        if isinstance(heard.message, Link):
            self._workers[heard.worker] = heard.message
        elif heard.message is None:
            self._give(self._agent.on_event(heard.worker, Died(f"its worker {heard.worker} is gone")))
        elif isinstance(heard.message, Event):
            self._give(self._agent.on_event(heard.worker, heard.message))

    def _miss_silent(self) -> None:
        """A worker that is stopped, or holds its interpreter for long, is as good as dead."""
        limit = time.monotonic() - SILENT_LEASES * self._start.settings.lease_seconds
        for worker, heard in self._last_heard.items():
            if heard < limit and not self._agent.ended:
                self._last_heard[worker] = math.inf
                self._give(self._agent.on_event(worker, Died(f"its worker {worker} is silent")))

    def _give(self, commands: list[Command]) -> None:
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
        """To the coordinator, also to one that has returned."""
        while True:
            try:
                link = connect(self._start.host, self._start.port, self._token)
            except (OSError, ValueError):
                time.sleep(0.05)
                continue
            self._heard.put(_Heard(None, link))
            self._agent.changed = True
            with suppress(LinkClosed):
                while True:
                    self._heard.put(_Heard(None, link.receive()))
            self._heard.put(_Heard(None, None))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.01)
                continue
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        try:
            link = accept(connection, self._token)
            hello = link.receive()
            if not isinstance(hello, Hello) or hello.index in self._pids:
                link.close()
                return
        except (OSError, ValueError):
            return
        self._pids[hello.index] = hello.pid
        self._heard.put(_Heard(hello.index, link))
        with suppress(LinkClosed):
            while True:
                self._heard.put(_Heard(hello.index, link.receive()))
        self._heard.put(_Heard(hello.index, None))


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
    say(port=service.port, pid=os.getpid())
    service.serve()


if __name__ == "__main__":
    main()
