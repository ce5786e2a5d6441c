"""The coordinator as a process: agents on one side, a file that outlives it on the other. Imports no torch."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dilatant.report.durable import write_durably
from dilatant.resilience.process import Start, end_with_parent, read_start, say
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import Effect, Order, Persist, Record, Status, Task
from dilatant.resilience.wire import Link, LinkClosed, accept, close_all, listen

TICK_SECONDS = 0.05
LAST_SECONDS = 5.0
"""What agents have to end after the run has."""
STATE = "coordinator.json"
EVENTS = "events.jsonl"
PID = "coordinator.pid"


@dataclass(frozen=True, slots=True)
class _Heard:
    link: Link
    message: Any
    """None: the link is closed."""


def read_record(folder: Path) -> Record | None:
    """What the last coordinator of a run wrote down. Raises ValueError for something else."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"{folder / STATE}: {error}") from None


class Service:
    """Serves one coordinator until the run has stopped, or another coordinator has taken over."""

    def __init__(self, start: Start) -> None:
        self._folder = Path(start.folder)
        self._token = bytes.fromhex(start.token)
        self._listener = listen(start.host, start.port)
        self.port: int = self._listener.getsockname()[1]
        self._heard: queue.Queue[_Heard] = queue.Queue()
        self._links: dict[str, Link] = {}
        self._coordinator = Coordinator(start.settings, read_record(self._folder), time.monotonic())
        self._shown = (0, Task.WAIT)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def serve(self) -> None:
        coordinator = self._coordinator
        self._carry_out(coordinator.start())
        ended: float | None = None
        while ended is None or (self._links and time.monotonic() - ended < LAST_SECONDS):
            try:
                heard = self._heard.get(timeout=TICK_SECONDS)
            except queue.Empty:
                self._carry_out(coordinator.tick(time.monotonic()))
            else:
                self._hear(heard)
            if coordinator.stopped and ended is None:
                ended = time.monotonic()
        close_all(self._links.values())

    def _hear(self, heard: _Heard) -> None:
        now = time.monotonic()
        if isinstance(heard.message, Status):
            self._links.setdefault(heard.message.node, heard.link)
            if self._links[heard.message.node] is not heard.link:  # it connected again
                self._links[heard.message.node].close()
                self._links[heard.message.node] = heard.link
            self._carry_out(self._coordinator.hear(heard.message, now))
            return
        heard.link.close()
        for node in [node for node, link in self._links.items() if link is heard.link]:
            del self._links[node]
            self._carry_out(self._coordinator.lost(node, now))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self._persist(effect.record)
            elif (link := self._links.get(effect.node)) is not None:
                with suppress(LinkClosed):
                    link.send(effect)
        if any(isinstance(effect, Order) for effect in effects):
            self._show()

    def _persist(self, record: Record) -> None:
        """Raises SystemExit where another coordinator has taken over: it must not be contradicted."""
        written = read_record(self._folder)
        if written is not None and written.term > record.term:
            raise SystemExit("another coordinator has taken over")
        write_durably(self._folder / STATE, msgspec.json.encode(record).decode() + "\n")

    def _show(self) -> None:
        """A line of the run's history at every change of what is to be done."""
        coordinator = self._coordinator
        shown = coordinator.generation, coordinator.task
        if shown == self._shown:
            return
        self._shown = shown
        event = {
            "time": time.time(),
            "task": coordinator.task.value,
            "generation": coordinator.generation,
            "step": coordinator.committed,
            "members": list(coordinator.members),
            "reason": coordinator.stopped or coordinator.reason,
        }
        with suppress(OSError), (self._folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")  # a full disk costs the history, not the run

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
        except (OSError, ValueError):
            return
        try:
            while True:
                self._heard.put(_Heard(link, link.receive()))
        except LinkClosed:
            self._heard.put(_Heard(link, None))


def main() -> None:
    """Read how to start from standard input, whose end is that of whoever started this."""
    start = read_start()
    end_with_parent()
    try:
        service = Service(start)
        write_durably(Path(start.folder) / PID, f"{os.getpid()}\n")
        say(port=service.port, pid=os.getpid())
        service.serve()
    except (OSError, ValueError) as error:
        raise SystemExit(f"the coordinator cannot work: {error}") from None


if __name__ == "__main__":
    main()
