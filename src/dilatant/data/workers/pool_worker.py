"""Pool worker: the main loop of a process that makes samples for all connected ranks in turn, until its owner exits."""

from __future__ import annotations

import mmap
import os
import selectors
import shutil
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from msgspec import MsgspecError

from dilatant.comm.fork_server import remove_orphaned_folder
from dilatant.comm.wire.link import FrameError, FrameReader
from dilatant.data.sample import Dataset, Sample
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers import pool_wire as wire
from dilatant.data.workers.ordered_map import WorkerError, begin_work, unpickle_job
from dilatant.data.workers.pool import SampleRequest, answer

PING, PONG, LEAVE = b"ping", b"pong", b"leave"
STRANGE = (OSError, ValueError, MsgspecError, RecursionError)
"""Errors from a connection that ends or sends invalid messages; RecursionError comes from unbounded nesting."""


def work(
    owner: Connection,
    listener: socket.socket,
    job: bytes,
    folder: str,
    decode_seconds: float,
    deaths: list[wire.Death],
    shared: str | None = None,
) -> None:
    """Run a worker. job: pickled (data sets by name, encoding). folder: the pool's socket folder, removed when the
    owner is gone. deaths: of this place's former workers. shared: see `remove_orphaned_folder`."""
    begin_work()
    threading.Thread(target=_answer_owner, args=(owner, folder, shared), daemon=True).start()
    _Worker(listener, job, decode_seconds, deaths).serve()


def _answer_owner(owner: Connection, folder: str, shared: str | None) -> None:
    """Answer the owner's pings. Exit when the owner is gone or reports that this worker was replaced, even if the main
    thread is waiting for a file."""
    try:
        while owner.recv_bytes() == PING:
            owner.send_bytes(PONG)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        remove_orphaned_folder(shared)
    os._exit(0)


class _RankLink:
    """The connection to a rank, with its arena and its queued requests."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = FrameReader(wire.MAX_ASK_BYTES)
        self.arena: mmap.mmap | None = None
        self.note = 0
        self.requests: deque[wire.PoolAsk] = deque()

    def notes(self, ticket: int, since: float, sample: str = "") -> None:
        """Write the current request into the rank's arena, to be read after a crash. ticket: -1 for another rank's."""
        if self.arena is not None:
            with memoryview(self.arena) as arena, arena[self.note : self.note + wire.NOTE_BYTES] as note:
                wire.write_note(note, ticket, since, sample)

    def close(self) -> None:
        self.connection.close()
        self.requests.clear()
        if self.arena is not None:
            self.arena.close()


class _Worker:
    def __init__(self, listener: socket.socket, job: bytes, decode_seconds: float, deaths: list[wire.Death]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._job = job
        self._datasets: Mapping[str, Dataset] = {}
        self._encoding: Encoding | None = None
        self._decode_seconds = decode_seconds
        self._deaths = deaths
        self._ranks: deque[_RankLink] = deque()  # least recently served first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            busy = any(rank.requests for rank in self._ranks)
            for key, _ in self._selector.select(0 if busy else None):
                if key.data is None:
                    self._accept()
                else:
                    self._guarded(key.data, self._receive)
            for _ in range(len(self._ranks)):
                rank = self._ranks[0]
                self._ranks.rotate(-1)
                if rank.requests:
                    self._guarded(rank, self._answer)
                    break

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the rank has disconnected again
            return
        # A rank that does not read its answers is dropped after this timeout, because other ranks wait.
        connection.settimeout(max(1.0, self._decode_seconds))
        rank = _RankLink(connection)
        self._ranks.append(rank)
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _guarded(self, rank: _RankLink, step: Callable[[_RankLink], None]) -> None:
        try:
            step(rank)
        except STRANGE:  # the rank is gone or sends invalid messages
            self._selector.unregister(rank.connection)
            self._ranks.remove(rank)
            rank.close()

    def _receive(self, rank: _RankLink) -> None:
        descriptors: list[int] = []
        if rank.arena is None:
            data, descriptors, _, _ = socket.recv_fds(rank.connection, 1 << 16, 1)
        else:
            data = rank.connection.recv(1 << 16)
        try:
            if not data:
                raise ConnectionError("it left")
            for body in rank.frames.feed(data):
                message = wire.to_worker.decode(body)
                if isinstance(message, wire.PoolHello):
                    if not 0 <= message.note <= message.arena_bytes - wire.NOTE_BYTES:
                        raise FrameError("a note outside the arena")
                    rank.arena = mmap.mmap(descriptors[0] if descriptors else -2, message.arena_bytes)
                    rank.note = message.note
                    rank.connection.sendall(
                        wire.to_frame(wire.Greeting(os.getpid(), self._decode_seconds, self._deaths))
                    )
                elif rank.arena is None or not (
                    0 <= message.offset <= message.offset + message.space <= len(rank.arena)
                    and message.packed <= message.space
                ):
                    raise FrameError("a slot outside the arena")
                else:
                    rank.requests.append(message)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, rank: _RankLink) -> None:
        ask, since = rank.requests.popleft(), time.monotonic()
        for other in self._ranks:
            other.notes(ask.ticket if other is rank else -1, since)
        assert rank.arena is not None  # requests come behind the arena
        sample = wire.unpack_undecoded(rank.arena[ask.offset : ask.offset + ask.packed]) if ask.packed else None
        request = SampleRequest(ask.draw, ask.index, frozenset(ask.parts), ask.dataset, sample=sample)

        def read(sample: Sample) -> None:
            rank.notes(ask.ticket, since, sample.id)

        try:
            if self._encoding is None:
                self._datasets, self._encoding = unpickle_job(self._job)
            # Without a handler, which would wait for C code to return: the signal kills this process.
            signal.setitimer(signal.ITIMER_REAL, self._decode_seconds)
            try:
                message, arrays = answer(ask.ticket, request, self._datasets, self._encoding, read)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if isinstance(message, wire.Encoded) and message.nbytes <= ask.space:
                with memoryview(rank.arena) as arena, arena[ask.offset : ask.offset + message.nbytes] as slot:
                    wire.write(slot, message.places, arrays)
            elif isinstance(message, wire.Encoded):
                message.inline = wire.pack_arrays(message, arrays)
            frame = wire.to_frame(message)
        except WorkerError as error:
            frame = wire.to_frame(wire.Failed(ask.ticket, f"a data worker failed: {error}"))
        except BaseException:
            frame = wire.to_frame(wire.Failed(ask.ticket, f"a data worker failed:\n{traceback.format_exc()}"))
        rank.connection.sendall(frame)
