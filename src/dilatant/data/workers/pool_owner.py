"""Owner of a machine's data workers: starts, watches and replaces them. Processes of the same user may connect."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dilatant.comm.fork_server import NO_GUARD, NO_GUARD_EXIT
from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.files.durable import write_durably
from dilatant.data.sample import Dataset
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import how_ended, start_worker
from dilatant.data.workers.pool_wire import Death
from dilatant.data.workers.pool_worker import LEAVE, PING, work

DECODE_SECONDS = 60.0
"""Default time limit for making one sample."""
GRACE_SECONDS = 5.0
"""Extra time after which a silent worker is considered hung."""
START_SECONDS = 120.0
"""Time limit for the start of a worker."""
START_TRIES = 5
"""Number of times the fork server is asked for a worker."""
START_PAUSE_SECONDS = 0.2
FAILED_STARTS = 3
"""Consecutive failed starts after which the pool is given up."""
DEATHS_KEPT = 16
TICK_SECONDS = 0.5
REASON = "reason"
"""Name of the file in the socket folder with the reason why a pool was given up."""

_log = logging.getLogger(__name__)


class PoolOwner:
    """`workers` processes that make samples for every rank that joins `address`, until this object or its process ends.

    A worker that dies is replaced. decode_seconds: time limit for one sample, enforced even while C code hangs.
    """

    def __init__(
        self, datasets: Mapping[str, Dataset], encoding: Encoding, workers: int, decode_seconds: float = DECODE_SECONDS
    ) -> None:
        if workers < 1:
            raise ValueError("a pool has at least one worker")
        group = _WorkerGroup(pickle.dumps((dict(datasets), encoding)), workers, decode_seconds)
        self.address = group.folder
        self._group = group
        self._end = util.Finalize(self, group.close, exitpriority=0)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers, in the order of their places."""
        return self._group.pids()

    @property
    def is_open(self) -> bool:
        """Return True while the pool is neither closed nor given up."""
        return not self._group.is_closed

    def close(self) -> None:
        """Kill the worker processes. Idempotent."""
        self._end()


@dataclass
class _WorkerSlot:
    """One worker's place, whose socket outlives the processes that serve it.

    is_ready: the process has answered a ping. is_pinged: a ping is unanswered. silent: ticks since that ping.
    """

    number: int
    listener: socket.socket
    process: Any = None
    pipe: Connection | None = None
    is_ready: bool = False
    is_pinged: bool = False
    silent: int = 0
    stood_still: bool = False
    failed_starts: int = 0
    deaths: list[Death] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return f"data worker {self.number} (process {self.process.pid})"


class _WorkerGroup:
    """The workers and their watcher thread. Holds no reference to `PoolOwner`, so that `PoolOwner` can be collected."""

    def __init__(self, job: bytes, workers: int, decode_seconds: float) -> None:
        self._job = job
        self._decode_seconds = decode_seconds
        self._temporary = TemporaryFolder()
        self.folder = self._temporary.path
        self.slots: list[_WorkerSlot] = []
        self._wake, self._wakes = multiprocessing.Pipe(duplex=False)
        self._lock = threading.Lock()  # held while workers are started or ended
        self.is_closed = False
        try:
            for number in range(workers):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.slots.append(_WorkerSlot(number, listener))
                listener.bind(str(Path(self.folder) / f"{number}.sock"))
                listener.listen(1024)
            for slot in self.slots:
                self._start(slot)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="dilatant-data-workers", daemon=True)
        self._thread.start()

    def pids(self) -> list[int]:
        with self._lock:
            return [slot.process.pid for slot in self.slots]

    def _start(self, slot: _WorkerSlot) -> None:
        """Start a worker. Raises OSError or EOFError after several tries: a fork server that has just exited may only
        be noticed when it does not answer; the next try starts a new one."""
        given = slot.listener, self._job, self.folder, self._decode_seconds, slot.deaths
        for attempt in range(1, START_TRIES + 1):
            try:
                slot.process, slot.pipe = start_worker(slot.number, work, *given)
                break
            except (OSError, EOFError):
                if attempt == START_TRIES:
                    raise
                time.sleep(START_PAUSE_SECONDS)
        slot.is_ready, slot.is_pinged, slot.silent, slot.stood_still = False, False, 0, False

    def _watch(self) -> None:
        next_tick = time.monotonic()
        while True:
            pipes = [slot.pipe for slot in self.slots if slot.pipe is not None]
            sentinels = [slot.process.sentinel for slot in self.slots]
            ready = wait([self._wake, *pipes, *sentinels], max(0.0, next_tick - time.monotonic()))
            with self._lock:
                if self.is_closed:
                    return
                try:
                    for slot in self.slots:
                        if slot.pipe in ready:
                            self._hear(slot)
                        if slot.process.sentinel in ready and not self.is_closed:
                            self._replace(slot)
                except Exception:
                    self._give_up(f"a new one could not be started:\n{traceback.format_exc()}")
                if self.is_closed:
                    return
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    for slot in self.slots:
                        self._tick(slot)

    def _hear(self, slot: _WorkerSlot) -> None:
        assert slot.pipe is not None
        try:
            slot.pipe.recv_bytes()
            slot.is_ready, slot.is_pinged, slot.silent, slot.failed_starts = True, False, 0, 0
        except (EOFError, OSError):  # the process sentinel reports how the worker ended
            slot.pipe.close()
            slot.pipe = None

    def _tick(self, slot: _WorkerSlot) -> None:
        """Ping the worker, or kill it after too long a silence. Silence is measured in ticks, so that a pause of this
        process is not charged to the worker."""
        if slot.pipe is None:
            return
        if not slot.is_pinged:
            slot.is_pinged = True
            with suppress(OSError):
                slot.pipe.send_bytes(PING)
            return
        slot.silent += 1
        patience = self._decode_seconds + GRACE_SECONDS if slot.is_ready else START_SECONDS
        if slot.silent * TICK_SECONDS > patience:
            slot.stood_still = True
            slot.process.kill()

    def _replace(self, slot: _WorkerSlot) -> None:
        slot.process.join()
        death = _death(slot, self._decode_seconds)
        slot.failed_starts += not slot.is_ready
        if slot.process.exitcode == NO_GUARD_EXIT and not slot.is_ready:
            return self._give_up(NO_GUARD)
        _log.warning("%s %s; another one takes its place", slot.shown, death.how)
        slot.deaths = [*slot.deaths, death][-DEATHS_KEPT:]
        if slot.pipe is not None:
            with suppress(OSError):  # the worker may still live if the fork server has exited
                slot.pipe.send_bytes(LEAVE)
            slot.pipe.close()
        if slot.failed_starts < FAILED_STARTS:
            self._start(slot)
            return
        self._give_up(f"{slot.shown} {death.how} before it could begin, like {FAILED_STARTS - 1} before it")

    def _give_up(self, reason: str) -> None:
        with suppress(OSError):
            write_durably(Path(self.folder, REASON), reason)
        self._end_all()

    def _end_all(self) -> None:
        self.is_closed = True
        for slot in self.slots:
            slot.listener.close()
            if slot.process is not None:
                slot.process.kill()
        for slot in self.slots:
            if slot.process is not None:
                slot.process.join(timeout=5)  # it may wait for a dead file server, and exits later
            if slot.pipe is not None:
                slot.pipe.close()
                slot.pipe = None

    def close(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._end_all()
        self._wakes.send_bytes(b".")
        self._temporary.close()


def _death(slot: _WorkerSlot, decode_seconds: float) -> Death:
    code = slot.process.exitcode
    if code == -signal.SIGALRM:
        return Death(slot.process.pid, f"was ended after {decode_seconds:g} s at one sample", True)
    stood_still = f"stood still for {decode_seconds + GRACE_SECONDS:g} s and was ended"
    return Death(slot.process.pid, stood_still if slot.stood_still else how_ended(code), False)
