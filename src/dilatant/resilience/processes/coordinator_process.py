"""Coordinator process: it serves the agents and keeps a record on disk that outlives it. Imports no torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from dilatant.comm.wire.link import Connections, LinkClosed, Received, WireLink, listen
from dilatant.config.files.durable import write_durably
from dilatant.config.files.own_files import open_in_place, read_text
from dilatant.resilience.processes.messages import MESSAGES, JobRequest
from dilatant.resilience.processes.process import (
    NO_MAJORITY_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    ProcessStart,
    end_with_parent,
    read_start,
)
from dilatant.resilience.protocol.agent import End
from dilatant.resilience.protocol.candidate import LeaderCandidate
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import ASKED, Effect, Order, Persist, Record, Status, Task

TICK_SECONDS = 0.05
LAST_SECONDS = 5.0
"""Time for agents to end after the run has."""
STATE = "coordinator.json"
EVENTS = "events.jsonl"
PID = "coordinator.pid"
COMMIT = "commit"
"""Event in the history: the first step of a generation is committed, so training progresses."""


class RunEvent(msgspec.Struct, frozen=True):
    """A line of the run's history. time: seconds since 1970. task: of the nodes, or COMMIT. step: steps committed."""

    time: Annotated[float, msgspec.Meta(gt=-1e11, lt=1e11)]
    task: str
    generation: int
    step: int
    members: tuple[str, ...]
    reason: str


def read_record(folder: Path) -> Record | None:
    """Read the record of a run's last coordinator; None if there is none. Raises ValueError for an invalid file."""
    try:
        return msgspec.json.decode(read_text(folder / STATE), type=Record)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{folder / STATE}: {error}") from None


def known_record(folder: Path) -> Record:
    """Return the last coordinator's record; an empty one if it cannot be read now."""
    try:
        return read_record(folder) or Record()
    except (OSError, ValueError):
        return Record()


class CoordinatorService:
    """Serves one coordinator until the run has stopped, or another coordinator has taken over."""

    def __init__(self, start: ProcessStart) -> None:
        self._folder = Path(start.folder)
        listener = listen(start.host, start.port)
        self.port: int = listener.getsockname()[1]
        self._connections = Connections(listener, bytes.fromhex(start.token), MESSAGES)
        self._job = start.job
        self._is_asked_to_end = threading.Event()
        self._links: dict[str, WireLink] = {}
        self._settings = start.settings
        self._majority_seconds = start.majority_seconds
        self._coordinator = Coordinator(start.settings, read_record(self._folder), time.monotonic())
        self._shown = (0, Task.WAIT)
        self._began_at: int | None = None
        self._lost: list[str] = []

    def serve(self) -> None:
        """Run the coordinator. Raises SystemExit if another one has taken over, or most members do not connect."""
        early = self._await_majority() if self._majority_seconds else []
        coordinator = self._coordinator = Coordinator(self._settings, read_record(self._folder), time.monotonic())
        self._carry_out(coordinator.start())
        for heard in early:
            self._hear(heard)
        ended: float | None = None
        ticks = 0.0
        while ended is None or (self._links and time.monotonic() - ended < LAST_SECONDS):
            for heard in self._connections.wait(TICK_SECONDS):
                self._hear(heard)
            lost, self._lost = self._lost, []
            self._carry_out(coordinator.lost(lost, time.monotonic()))
            if time.monotonic() >= ticks:
                ticks = time.monotonic() + TICK_SECONDS
                self._carry_out(coordinator.tick(time.monotonic()))
            if self._is_asked_to_end.is_set():
                self._is_asked_to_end.clear()
                self._carry_out(coordinator.end(ASKED, time.monotonic()))
            if coordinator.stopped and ended is None:
                ended = time.monotonic()
        self._connections.close()

    def _await_majority(self) -> list[Received]:
        """Wait until most members have connected; returns their messages. Raises SystemExit if they do not."""
        deadline = time.monotonic() + self._majority_seconds
        candidate, early = LeaderCandidate(Record()), list[Received]()
        node_of: dict[WireLink, str] = {}
        while time.monotonic() < deadline:
            record = read_record(self._folder) or Record()
            if record.generation != candidate.record.generation or record.term != candidate.record.term:
                candidate = LeaderCandidate(record)
                for heard in early:
                    if isinstance(heard.message, Status) and heard.link in node_of:
                        candidate.hear(heard.message)
            if candidate.is_elected:
                return early
            for heard in self._connections.wait(TICK_SECONDS):
                if isinstance(heard.message, JobRequest):
                    self._hear(heard)
                    continue
                early.append(heard)
                if isinstance(heard.message, Status):
                    node_of[heard.link] = heard.message.node
                    candidate.hear(heard.message)
                elif heard.link in node_of:
                    candidate.lost(node_of.pop(heard.link))
        self._connections.close()
        raise SystemExit(NO_MAJORITY_EXIT_CODE)

    def end(self) -> None:
        """Ask all ranks to save and end; may be called from any thread or a signal handler."""
        self._is_asked_to_end.set()

    def _hear(self, heard: Received) -> None:
        now = time.monotonic()
        if isinstance(heard.message, JobRequest):
            refusal = End(self._coordinator.stopped or "it is on one machine, and starts its own agents")
            with suppress(LinkClosed):
                heard.link.send(refusal if self._coordinator.stopped else self._job or refusal)
            return
        if isinstance(heard.message, Status):
            self._links.setdefault(heard.message.node, heard.link)
            if self._links[heard.message.node] is not heard.link:  # it connected again
                self._connections.drop(self._links[heard.message.node])
                self._links[heard.message.node] = heard.link
            self._carry_out(self._coordinator.hear(heard.message, now))
            return
        self._connections.drop(heard.link)
        gone = [node for node, link in self._links.items() if link is heard.link]
        self._lost += gone  # a rack that is lost is one new generation
        for node in gone:
            del self._links[node]

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
        """Write the record. Raises SystemExit if another coordinator has taken over, whose record is valid."""
        written = read_record(self._folder)
        if written is not None and written.term > record.term:
            raise SystemExit(SUPERSEDED_EXIT_CODE)
        write_durably(self._folder / STATE, msgspec.json.encode(record).decode() + "\n")

    def _show(self) -> None:
        """Append to the run's history when the task changes, and at a generation's first step."""
        coordinator = self._coordinator
        shown = coordinator.generation, coordinator.task
        if shown != self._shown:
            self._shown = shown
            self._began_at = coordinator.committed if coordinator.task is Task.RUN else None
            self._write_event(coordinator.task.value)
        elif self._began_at is not None and coordinator.committed > self._began_at:
            self._began_at = None
            self._write_event(COMMIT)

    def _write_event(self, task: str) -> None:
        coordinator = self._coordinator
        event = RunEvent(
            time.time(),
            task,
            coordinator.generation,
            coordinator.committed,
            coordinator.members,
            coordinator.stopped or coordinator.reason,
        )
        with suppress(OSError), open_in_place(self._folder / EVENTS) as file:
            file.write(msgspec.json.encode(event) + b"\n")  # a full disk must not end the run


def main() -> None:
    """Run the coordinator as configured on standard input, which closes when the parent process ends."""
    start = read_start()
    try:
        service = CoordinatorService(start)
        end_with_parent()
        signal.signal(signal.SIGTERM, lambda *_: service.end())
        write_durably(Path(start.folder) / PID, f"{os.getpid()}\n")
        print(service.port, flush=True)
        service.serve()
    except (OSError, ValueError) as error:
        raise SystemExit(f"the coordinator cannot work: {error}") from None


if __name__ == "__main__":
    main()
