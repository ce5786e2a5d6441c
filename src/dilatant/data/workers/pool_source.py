"""Client of the machine's data workers for one rank: sends requests as memory permits and stores replies until taken.

A thread owns the connections. Workers write samples into an arena of this process, from which they are copied at
once. When a worker dies, the sample that it was making is retried, preferably by another worker, and its other
requests are sent again.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import MsgspecError

from dilatant.comm.fork_server import NO_GUARD
from dilatant.comm.wire.link import FrameError, FrameReader
from dilatant.data.errors import SampleError
from dilatant.data.workers import pool_wire as wire
from dilatant.data.workers.ordered_map import UnreadableFileError, WorkerError
from dilatant.data.workers.pool import Waiting
from dilatant.data.workers.pool_owner import REASON
from dilatant.data.workers.request_queue import Entry, QueuedSource

TASKS_PER_WORKER = 3
"""Requests that a worker holds for a rank: one being made and the next ones queued, so that it never waits."""
LATE_SECONDS = 15.0
"""Time beyond a sample's time limit after which its worker is given up, because the system does not let it exit."""
SEND_SECONDS = 5.0
UNGREETED = 20
"""Consecutive connections that end before a greeting, after which a worker's place is given up."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _WorkerLink:
    """Connection to one worker's place. pid: the process that greeted; 0 before. heard: time of its last message.

    in_doubt: (sample, pid) for each worker that died while making the sample, until its successor reports the cause.
    ungreeted: consecutive connections that ended before a greeting. is_down: no process listens there any more.
    """

    number: int
    path: str
    connection: socket.socket | None = None
    frames: FrameReader = field(default_factory=lambda: FrameReader(wire.MAX_FRAME_BYTES))
    pid: int = 0
    decode_seconds: float = float("inf")
    entries: dict[int, Entry] = field(default_factory=dict)
    in_doubt: list[tuple[Entry, int]] = field(default_factory=list)
    heard: float = 0.0
    ungreeted: int = 0
    is_down: bool = False

    @property
    def shown(self) -> str:
        return f"data worker {self.number}" + (f" (process {self.pid})" if self.pid else "")


@dataclass(eq=False)
class _Leaving:
    """A connection given up by this rank. Its worker may still write into `slots` until it closes the connection."""

    connection: socket.socket
    slots: list[int]


class PoolSource(QueuedSource):
    """The `SampleSource` of a rank, which is connected to the workers at `PoolOwner.address`; one per rank.

    budget_bytes: memory for samples that are being made, or are ready and not taken. on_wait: called by the thread in
    `take` after every ten seconds of waiting. Raises WorkerError if there are no workers at `address`.
    """

    workers = "data workers"
    tries = 2

    def __init__(
        self, address: str, budget_bytes: int, on_wait: Callable[[Waiting], None] = lambda waiting: None
    ) -> None:
        super().__init__(budget_bytes, on_wait)
        paths = sorted(_checked(address).glob("*.sock"), key=lambda path: int(path.stem))
        self._folder = Path(address)
        notes = wire.NOTE_BYTES * (1 + max((int(path.stem) for path in paths), default=0))
        self._arena = wire.Arena(notes + budget_bytes, notes)
        self._next_ticket = 0
        self._wake, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._links = [_WorkerLink(int(path.stem), str(path)) for path in paths]
        self._leaving: list[_Leaving] = []
        for link in self._links:
            self._connect(link)
        self._check_links()
        if self.error is not None:
            self._release_all()
            raise self.error
        self._thread.start()

    # Called by both threads, with the lock held.

    def _place_of(self, entry: Entry) -> str:
        link: _WorkerLink | None = entry.holder
        return link.shown if link is not None and self._begun(link)[0] is entry else ""

    def _begun(self, link: _WorkerLink) -> tuple[Entry | None, wire.Note | None]:
        """Return this rank's request that the worker is making, or was making when it died, and the worker's note;
        None if unknown."""
        with self._arena.view(wire.NOTE_BYTES * link.number, wire.NOTE_BYTES) as buffer:
            note = wire.read_note(buffer)
        entry = link.entries.get(note.ticket) if note is not None else None
        if entry is not None and note is not None:
            entry.name = note.sample or entry.name
        return entry, note

    def _poke(self) -> None:
        with suppress(OSError):  # the socket is full, so the thread will wake anyway; or it is closed
            self._wakes.send(b".")

    def _send(self, link: _WorkerLink, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if link.connection is None:
            return
        try:
            if descriptors:
                socket.send_fds(link.connection, [data], descriptors)
            else:
                link.connection.sendall(data)
        except OSError:
            # The thread notices the end of the connection after it has read the earlier answers.
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)

    # Called by the thread.

    def _work(self) -> None:
        while True:
            with self.changed:
                if self.is_closing:
                    return
                self._dispatch()
                self._drop_late()
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._wake.recv(1 << 12)
                elif isinstance(key.data, _Leaving):
                    self._drain(key.data)
                else:
                    self._receive(key.data)

    def _release_all(self) -> None:
        self._selector.close()
        for leaving in self._leaving:
            leaving.connection.close()
        for link in self._links:
            if link.connection is not None:
                link.connection.close()
                link.connection = None
        self._wake.close()
        self._wakes.close()
        self._arena.close()

    def _dispatch(self) -> None:
        """Send requests in order, as long as workers and budget permit."""
        while True:
            free = [link for link in self._links if link.pid and len(link.entries) < TASKS_PER_WORKER]
            entry = self.next() if free else None
            if entry is None:
                return
            request = entry.request
            packed = b"" if request.sample is None else wire.pack_undecoded(request.sample)
            self.enlarge(entry, len(packed))
            space = entry.charge
            entry.slot = self._arena.allocate(space)
            if entry.slot is None:  # the answer may come inside the message, an undecoded sample travels in the arena
                space = len(packed)
                entry.slot = self._arena.allocate(space) if packed else None
            if entry.slot is None and packed:
                self.discharge(entry)
                if len(packed) <= self.budget:
                    self.requeue(entry)
                    return
                problem = f"has {len(packed):,} bytes, more than the {self.budget:,} of 'data.memory'"
                self.conclude(entry, SampleError(entry.name, problem, "raise 'data.memory'"))
                continue
            link = min(free, key=lambda link: (link.number == entry.avoided, len(link.entries)))
            entry.holder, entry.ticket = link, self._next_ticket
            self._next_ticket += 1
            if not link.entries:
                link.heard = time.monotonic()
            link.entries[entry.ticket] = entry
            if packed:
                with self._arena.view(entry.slot or 0, len(packed)) as slot:
                    slot[:] = packed
            ask = wire.PoolAsk(entry.ticket, request.dataset, request.index, request.draw, sorted(request.parts),
                      entry.slot or 0, space, len(packed))  # fmt: skip
            self._send(link, wire.to_frame(ask))

    def _receive(self, link: _WorkerLink) -> None:
        assert link.connection is not None
        data = _read(link.connection)
        link.heard = time.monotonic()
        problem = ""
        try:
            for body in link.frames.feed(data):
                with self.changed:
                    self._handle(link, wire.to_rank.decode(body))
        except (FrameError, MsgspecError) as error:
            problem = f"it answered with what is no message of a data worker ({error})"
        if not data or problem:
            with self.changed:
                self._lose(link, problem)

    def _handle(self, link: _WorkerLink, message: wire.ToRank) -> None:
        if isinstance(message, wire.Greeting):
            link.pid, link.decode_seconds, link.ungreeted = message.pid, message.decode_seconds, 0
            self._retry_in_doubt(link, message)
        elif message.ticket in link.entries:
            entry = link.entries.pop(message.ticket)
            if not isinstance(message, wire.Encoded) or entry.is_forgotten:
                self.answered(entry, message, memoryview(b""))
            elif message.inline is not None:
                self.answered(entry, message, memoryview(message.inline))
            else:
                with self._arena.view(entry.slot or 0, entry.charge) as slot:
                    self.answered(entry, message, slot)
            self._discharge(entry)

    def _discharge(self, entry: Entry) -> None:
        """Release a request's slot and charge: no worker holds the request, and nobody writes into the slot."""
        if entry.slot is not None:
            self._arena.release(entry.slot)
        self.discharge(entry)

    # Loss of workers.

    def _connect(self, link: _WorkerLink) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SEND_SECONDS)
        try:
            connection.connect(link.path)
        except OSError:
            connection.close()
            link.is_down = True
            return
        link.connection = connection
        self._selector.register(connection, selectors.EVENT_READ, link)
        hello = wire.PoolHello(self._arena.nbytes, wire.NOTE_BYTES * link.number)
        self._send(link, wire.to_frame(hello), [self._arena.fd])

    def _lose(self, link: _WorkerLink, why: str = "", is_late: bool = False) -> None:
        """Handle a lost worker; its place will get another process. why: reason, if it may live and is given up."""
        assert link.connection is not None
        begun, _ = self._begun(link)
        pid, lost = link.pid, list(link.entries.values())
        if why:
            self._log_given_up(link, why)
            self._abandon(link.connection, lost)
        else:
            self._selector.unregister(link.connection)
            link.connection.close()
        link.ungreeted += not link.pid
        link.entries.clear()
        for entry in reversed(lost):
            self._discharge(entry)
            if entry.is_forgotten:
                continue
            if entry is not begun:
                self.requeue(entry)
            elif is_late:
                self._retry(entry, link, f"{link.shown} did not end", is_late=True)
            else:
                link.in_doubt.append((entry, pid))
        link.connection, link.pid, link.frames = None, 0, FrameReader(wire.MAX_FRAME_BYTES)
        link.is_down = link.ungreeted >= UNGREETED
        if not link.is_down:
            self._connect(link)
        if link.is_down:  # without a successor nobody tells why: perhaps all workers are ending, which no sample caused
            in_doubt, link.in_doubt = link.in_doubt, []
            for entry, _ in in_doubt:
                self.requeue(entry)
        self._check_links()

    def _log_given_up(self, link: _WorkerLink, why: str) -> None:
        """Log that a worker was given up, once per worker: only the first rank of the machine that gives it up logs."""
        with suppress(OSError):
            (self._folder / f"given-up-{link.pid}").touch(exist_ok=False)
            _log.warning("%s was given up: %s; others make what it had", link.shown, why)

    def _abandon(self, connection: socket.socket, lost: Sequence[Entry]) -> None:
        """Tell a live worker that this rank sends no more requests. Keep its slots until the connection is closed, by
        the worker or by the system when the worker exits."""
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        leaving = _Leaving(connection, [entry.slot for entry in lost if entry.slot is not None])
        for entry in lost:
            entry.slot = None
        self._leaving.append(leaving)
        self._selector.modify(connection, selectors.EVENT_READ, leaving)

    def _drain(self, leaving: _Leaving) -> None:
        if _read(leaving.connection):  # discard late answers
            return
        self._selector.unregister(leaving.connection)
        leaving.connection.close()
        with self.changed:
            self._leaving.remove(leaving)
            for slot in leaving.slots:
                self._arena.release(slot)

    def _retry_in_doubt(self, link: _WorkerLink, greeting: wire.Greeting) -> None:
        """Retry the samples that dead workers of this place were making, now that the successor reports the causes."""
        deaths = {death.pid: death for death in greeting.deaths}
        in_doubt, link.in_doubt = link.in_doubt, []
        for entry, pid in in_doubt:
            death = deaths.get(pid)
            how = f"data worker {link.number} (process {pid}) {death.how if death else 'ended'}"
            self._retry(entry, link, how, death is not None and death.is_slow)

    def _retry(self, entry: Entry, link: _WorkerLink, how: str, is_late: bool) -> None:
        if entry.is_forgotten:
            return
        entry.avoided = link.number
        self.lost(entry, how, is_late, link.decode_seconds)

    def _drop_late(self) -> None:
        """Give up workers that the system does not let exit. One that ignores this rank may serve other ranks."""
        now = self._awake.now()
        for link in self._links:
            if not link.entries or link.connection is None:
                continue
            begun, note = self._begun(link)
            since = max(self._awake.since, note.since if note is not None else 0.0)
            if begun is not None and now - since > link.decode_seconds + LATE_SECONDS:
                why = f"it has been at {begun.name} for {now - since:.0f} s and does not end"
            # The worker may wait for a rank that does not read, for as long as the time limit of a sample.
            elif now - max(since, link.heard) > 2 * link.decode_seconds + LATE_SECONDS:
                why = f"it has begun nothing for {now - max(since, link.heard):.0f} s"
            else:
                continue
            # Unread messages from the worker would be a sign of life.
            if not select.select([link.connection], [], [], 0)[0]:
                self._lose(link, why, is_late=True)

    def _check_links(self) -> None:
        if not all(link.is_down for link in self._links):
            return
        reason: Any = "the process that started them has ended"
        with suppress(OSError):
            reason = (self._folder / REASON).read_text(encoding="utf-8")
        if reason == NO_GUARD:
            self.fail(UnreadableFileError(NO_GUARD))
        else:
            self.fail(WorkerError(f"there are no data workers any more: {reason}"))


def _read(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived; b"" if the connection has ended."""
    try:
        return connection.recv(1 << 20)
    except OSError:
        return b""


def _checked(address: str) -> Path:
    """Return the socket folder. Raises WorkerError unless it belongs to this user alone."""
    try:
        found = os.lstat(address)
    except OSError as error:
        raise WorkerError(f"there are no data workers at {address}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WorkerError(f"{address} is no folder of this user alone, so its data workers are not trusted")
    return Path(address)
