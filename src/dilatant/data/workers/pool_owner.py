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

from dilatant.comm.fork_server import NO_GUARD, NO_GUARD_EXIT, multiprocessing_folder
from dilatant.comm.temporary import TemporaryFolder
from dilatant.config.files.durable import write_durably
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import warm_up
from dilatant.data.workers.pool import Dataset
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
        self,
        datasets: Mapping[str, Dataset],
        encoding: Encoding,
        workers: int,
        decode_seconds: float = DECODE_SECONDS,
    ) -> None:
        if workers < 1:
            raise ValueError("a pool has at least one worker")
        crew = _Crew(pickle.dumps((dict(datasets), encoding)), workers, decode_seconds)
        self.address = crew.folder
        self._crew = crew
        self._end = util.Finalize(self, crew.close, exitpriority=0)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the workers, in the order of their places."""
        return self._crew.pids()

    @property
    def is_open(self) -> bool:
        """Return True while the pool is neither closed nor given up."""
        return not self._crew.is_closed

    def close(self) -> None:
        """Kill the worker processes. Idempotent."""
        self._end()


@dataclass
class _WorkerSlot:
    """One worker's place, whose socket outlives the processes that serve it.

    is_ready: the process has answered a ping. is_asked: a ping is unanswered. silent: ticks since that ping.
    """

    number: int
    listener: socket.socket
    process: Any = None
    pipe: Connection | None = None
    is_ready: bool = False
    is_asked: bool = False
    silent: int = 0
    stood_still: bool = False
    failed_starts: int = 0
    deaths: list[Death] = field(default_factory=list)

    @property
    def shown(self) -> str:
        return f"data worker {self.number} (process {self.process.pid})"


class _Crew:
    """The workers and their watcher thread. Holds no reference to `PoolOwner`, so that `PoolOwner` can be collected."""

    def __init__(self, job: bytes, workers: int, decode_seconds: float) -> None:
        self._job = job
        self._decode_seconds = decode_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._temporary = TemporaryFolder()
        self.folder = self._temporary.path
        self.hands: list[_WorkerSlot] = []
        self._wake, self._wakes = multiprocessing.Pipe(duplex=False)
        self._lock = threading.Lock()  # held while workers are started or ended
        self.is_closed = False
        warm_up()
        try:
            for number in range(workers):
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self.hands.append(_WorkerSlot(number, listener))
                listener.bind(str(Path(self.folder) / f"{number}.sock"))
                listener.listen(1024)
            for hand in self.hands:
                self._start(hand)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="dilatant-data-workers", daemon=True)
        self._thread.start()

    def pids(self) -> list[int]:
        with self._lock:
            return [hand.process.pid for hand in self.hands]

    def _start(self, hand: _WorkerSlot) -> None:
        """Start a worker. Raises OSError or EOFError after several tries: a fork server that has just exited may only
        be noticed when it does not answer; the next try starts a new one."""
        for attempt in range(1, START_TRIES + 1):
            try:
                return self._start_once(hand)
            except (OSError, EOFError):
                if attempt == START_TRIES:
                    raise
                time.sleep(START_PAUSE_SECONDS)

    def _start_once(self, hand: _WorkerSlot) -> None:
        warm_up()  # preloads the modules again if the fork server has exited meanwhile
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=work,
            args=(
                hand.listener,
                theirs,
                self._job,
                self.folder,
                self._decode_seconds,
                hand.deaths,
                multiprocessing_folder(),
            ),
            name=f"dilatant-data-{hand.number}",
            daemon=True,
        )
        process.start()
        theirs.close()
        hand.process = process
        hand.pipe, hand.is_ready, hand.is_asked, hand.silent, hand.stood_still = ours, False, False, 0, False

    def _watch(self) -> None:
        next_tick = time.monotonic()
        while True:
            pipes = [hand.pipe for hand in self.hands if hand.pipe is not None]
            sentinels = [hand.process.sentinel for hand in self.hands]
            ready = wait([self._wake, *pipes, *sentinels], max(0.0, next_tick - time.monotonic()))
            with self._lock:
                if self.is_closed:
                    return
                try:
                    for hand in self.hands:
                        if hand.pipe in ready:
                            self._hear(hand)
                        if hand.process.sentinel in ready and not self.is_closed:
                            self._replace(hand)
                except Exception:
                    self._give_up(f"a new one could not be started:\n{traceback.format_exc()}")
                if self.is_closed:
                    return
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    for hand in self.hands:
                        self._tick(hand)

    def _hear(self, hand: _WorkerSlot) -> None:
        assert hand.pipe is not None
        try:
            hand.pipe.recv_bytes()
            hand.is_ready, hand.is_asked, hand.silent, hand.failed_starts = True, False, 0, 0
        except (EOFError, OSError):  # the process sentinel reports how the worker ended
            hand.pipe.close()
            hand.pipe = None

    def _tick(self, hand: _WorkerSlot) -> None:
        """Ping the worker, or kill it after too long a silence. Silence is measured in ticks, so that a pause of this
        process is not charged to the worker."""
        if hand.pipe is None:
            return
        if not hand.is_asked:
            hand.is_asked = True
            with suppress(OSError):
                hand.pipe.send_bytes(PING)
            return
        hand.silent += 1
        patience = self._decode_seconds + GRACE_SECONDS if hand.is_ready else START_SECONDS
        if hand.silent * TICK_SECONDS > patience:
            hand.stood_still = True
            hand.process.kill()

    def _replace(self, hand: _WorkerSlot) -> None:
        hand.process.join()
        death = _death(hand, self._decode_seconds)
        hand.failed_starts += not hand.is_ready
        if hand.process.exitcode == NO_GUARD_EXIT and not hand.is_ready:
            return self._give_up(NO_GUARD)
        _log.warning("%s %s; another one takes its place", hand.shown, death.how)
        hand.deaths = [*hand.deaths, death][-DEATHS_KEPT:]
        if hand.pipe is not None:
            with suppress(OSError):  # the worker may still live if the fork server has exited
                hand.pipe.send_bytes(LEAVE)
            hand.pipe.close()
        if hand.failed_starts < FAILED_STARTS:
            self._start(hand)
            return
        self._give_up(f"{hand.shown} {death.how} before it could begin, like {FAILED_STARTS - 1} before it")

    def _give_up(self, reason: str) -> None:
        with suppress(OSError):
            write_durably(Path(self.folder, REASON), reason)
        self._end_all()

    def _end_all(self) -> None:
        self.is_closed = True
        for hand in self.hands:
            hand.listener.close()
            if hand.process is not None:
                hand.process.kill()
        for hand in self.hands:
            if hand.process is not None:
                hand.process.join(timeout=5)  # it may wait for a dead file server, and exits later
            if hand.pipe is not None:
                hand.pipe.close()
                hand.pipe = None

    def close(self) -> None:
        with self._lock:
            if not self.is_closed:
                self._end_all()
        self._wakes.send_bytes(b".")
        self._temporary.close()


def _death(hand: _WorkerSlot, decode_seconds: float) -> Death:
    code = hand.process.exitcode
    if code == -signal.SIGALRM:
        return Death(hand.process.pid, f"was ended after {decode_seconds:g} s at one sample", True)
    if hand.stood_still:
        how = f"stood still for {decode_seconds + GRACE_SECONDS:g} s and was ended"
    elif code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", probably because memory ran out (use fewer 'data.workers')"
    else:
        how = f"ended with exit code {code}"
    return Death(hand.process.pid, how, False)
