"""Worker link: a worker's connection to its node's agent, for commands that may interrupt its communication."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping

from dilatant.comm.wire.link import LinkClosed, WireLink
from dilatant.resilience.processes.messages import Beat, Hello, StoreAt, Warm, connect
from dilatant.resilience.protocol.agent import (
    Activate,
    Apply,
    Broken,
    Command,
    Computing,
    Died,
    Done,
    End,
    Event,
    Fence,
    HandedOver,
    HandOver,
    Made,
    Prepared,
    Rebuild,
    SaveAndEnd,
    Slow,
    Stopped,
)

SOON_BEATS = 2
"""A step whose time limit is at most this many heartbeats is announced at once, not with the next heartbeat."""


class Fenced(Exception):
    """This generation is over: the worker must stop and wait to be rebuilt."""


class RunEnded(Exception):
    """The run is over; the message says why."""


class WorkerLink:
    """A worker's connection to its agent, used by one thread. A reader thread calls `on_fence` with the generation that
    is over, and `on_ending` when all ranks are to save and end. `await_rebuild` calls `on_hand_over` when the run
    continues without this worker, to export its part of the step.

    A worker without its agent exits at once: it would get no more commands, and the others continue without it.
    """

    def __init__(
        self,
        port: int,
        token: bytes,
        index: int,
        on_fence: Callable[[int], None],
        beat_seconds: float = 1.0,
        on_ending: Callable[[], None] = lambda: None,
        on_hand_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._link: WireLink = connect("127.0.0.1", port, token)
        self._on_fence = on_fence
        self._on_ending = on_ending
        self._on_hand_over = on_hand_over
        self._beat_seconds = beat_seconds
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._newest = 0
        self._generation = 0
        self.ended: End | None = None
        self.store_at: StoreAt | None = None
        """The store's address, once it differs from the one at the start of the run."""
        self._closed = False
        self._unreported: tuple[Computing, float] | None = None
        self._link.send(Hello(index, os.getpid()))
        threading.Thread(target=self._read, name="dilatant-agent", daemon=True).start()

    def warm(self) -> None:
        """Report that this worker can join a generation; from now on missing heartbeats are treated as a failure."""
        self._send(Warm())
        threading.Thread(target=self._beat, name="dilatant-beat", daemon=True).start()

    @property
    def generation(self) -> int:
        """The generation that this worker belongs to, or was last rebuilt for."""
        return self._generation

    @property
    def is_fenced(self) -> bool:
        """True if this worker's generation is over."""
        return self._newest > self._generation or self.ended is not None

    def await_rebuild(self, base: int, applied: int, prepared: int | None) -> Rebuild:
        """Wait, without computing, until this worker is to join a generation. Raises RunEnded.

        base, applied, prepared: see `Stopped`.
        """
        while True:
            command = self._next()
            if isinstance(command, Fence):
                self._send(Stopped(command.generation, base, applied, prepared))
            elif isinstance(command, HandOver):
                self._on_hand_over()
                self._send(HandedOver(command.generation))
            elif isinstance(command, Rebuild) and command.generation == self._newest:
                self._generation = command.generation
                return command

    def await_activation(self, applied: int) -> None:
        """Report that this worker is ready, and return when all are. Raises Fenced or RunEnded."""
        self._send(Made(self._generation, applied))
        self._await(Activate)

    def begin(self, step: int, limit_seconds: float) -> None:
        """Report that this worker begins to compute a step, with a time limit after which it is considered hung. A long
        limit is reported only with the next heartbeat: most steps are over by then and cost no message."""
        computing = Computing(self._generation, step, limit_seconds)
        if limit_seconds > SOON_BEATS * self._beat_seconds:
            self._unreported = computing, time.monotonic()
        else:
            self._send(computing)

    def propose(self, step: int, hashes: Mapping[str, int]) -> None:
        """Report that this worker has all gradients of a step. hashes: see `Prepared`."""
        self._unreported = None
        self._send(Prepared(self._generation, step, hashes))

    def await_commit(self) -> None:
        """Return when the proposed step is committed. Raises Fenced if the outcome is unknown, or RunEnded."""
        self._await(Apply)

    def slow(self, times: float) -> None:
        """Report that this worker is `times` slower than the others, which exceeds the limit; 0: no longer."""
        self._send(Slow(self._generation, times))

    def await_end(self, early: str = "") -> None:
        """Report that this worker has finished, and return when all have. early: see `Done`. Raises Fenced."""
        self._send(Done(self._generation, early))
        try:
            self._await(End)
        except RunEnded:
            return

    def broken(self, reason: str, fatal: bool = False, accuses: str | None = None) -> None:
        """Report that this worker cannot continue in its generation; fatal: no worker could. accuses: the unresponsive
        node that it waited for."""
        self._send(Broken(self._generation, reason[:2000], accuses, fatal))

    def lost(self, reason: str) -> None:
        """Report that this worker cannot take part at all."""
        self._send(Died(reason[:2000]))

    def close(self) -> None:
        self._closed = True
        self._link.close()

    def _await(self, wanted: type) -> None:
        while True:
            if self._newest > self._generation:
                raise Fenced
            command = self._next()
            if isinstance(command, Fence | HandOver):
                self._commands.put(command)  # `await_rebuild` answers it
                raise Fenced
            is_current = not isinstance(command, End | SaveAndEnd) and command.generation == self._generation
            if is_current and isinstance(command, wanted):
                return

    def _next(self) -> Command:
        command = self._commands.get()
        if isinstance(command, End):
            self._commands.put(command)
            raise RunEnded(command.reason)
        return command

    def _send(self, message: Event | Beat | Warm) -> None:
        try:
            self._link.send(message)
        except LinkClosed:
            if self.ended is None and not self._closed:
                os._exit(1)

    def _beat(self) -> None:
        """Send heartbeats; a process that is stopped, or whose interpreter is blocked, sends none."""
        reported: tuple[Computing, float] | None = None
        while True:
            time.sleep(self._beat_seconds)
            if self._closed or self.ended is not None:
                return
            self._send(Beat())
            if (unreported := self._unreported) is not None and unreported is not reported:
                reported = unreported
                computing, began = unreported
                left = max(0.0, computing.limit_seconds - (time.monotonic() - began))
                self._send(Computing(computing.generation, computing.step, left))

    def _read(self) -> None:
        try:
            while True:
                command = self._link.receive()
                if isinstance(command, StoreAt):
                    self.store_at = command
                    continue
                if isinstance(command, SaveAndEnd):
                    self._on_ending()
                    continue
                if isinstance(command, Fence | HandOver):
                    self._newest = command.generation
                if isinstance(command, End):
                    self.ended = command
                self._commands.put(command)
                if isinstance(command, Fence | HandOver | End):
                    self._on_fence(self._generation)
        except LinkClosed:
            if self.ended is None and not self._closed:
                os._exit(1)
