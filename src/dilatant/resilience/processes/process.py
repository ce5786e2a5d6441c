"""Start the coordinator and the agents: small processes that end with their parent. Imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from dilatant.resilience.processes.messages import Job, WorkerStart
from dilatant.resilience.protocol.values import Settings

AGENT = "dilatant.resilience.processes.agent_process"
COORDINATOR = "dilatant.resilience.processes.coordinator_process"
TOO_FEW_EXIT_CODE = 75
"""EX_TEMPFAIL: try again later, with more nodes."""
ASK = b"?"
ASK_SECONDS, ANSWER_SECONDS = 5.0, 10.0
"""Interval of liveness checks of a child, and the minimum time that it has to answer."""
SUPERSEDED_EXIT_CODE, NO_MAJORITY_EXIT_CODE = 3, 4
"""Exit codes of coordinators: another one has taken over; too few members connected to this one."""


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """Configuration of a coordinator or agent, read from standard input, since command lines are visible to every user.

    folder: of the coordinator's record and of the agents' descriptions. port: to listen on (0: any); for an agent, that
    of the coordinator at `host`. token: hexadecimal. node: an agent's name. workers: number of its workers.
    patience_seconds: time that an agent continues without a coordinator; 0: no limit, since it ends with its parent.
    job: a coordinator's answer to a `JobRequest`; for an agent, the answer that it received. majority_seconds: for a
    standby's coordinator, the time within which more than half of the last members must connect before it takes over.
    """

    host: str
    port: int
    token: str = field(repr=False)
    settings: Settings
    folder: str = ""
    node: str = ""
    workers: int = 1
    patience_seconds: float = 0.0
    job: Job | None = None
    majority_seconds: float = 0.0


def end_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait up to `seconds` for a process to end, then kill it."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Child:
    """A child process running `module`, as its parent sees it. stdout: None for this process's own."""

    def __init__(self, module: str, start: ProcessStart | WorkerStart, stdout: int | None = subprocess.PIPE) -> None:
        self._module = module
        self._pair, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", module],
                stdin=theirs.fileno(),
                stdout=stdout,
                start_new_session=True,  # Ctrl-C goes to the parent only
            )
        with suppress(OSError):  # it has ended already
            self._pair.sendall(msgspec.json.encode(start) + b"\n")
        self._pair.setblocking(False)
        settings = start.settings if isinstance(start, ProcessStart) else start.job.settings
        self._patience_seconds = max(ANSWER_SECONDS, 3 * settings.lease_seconds)
        self._ask_at = time.monotonic()
        self._asked_at: float | None = None
        self.has_answered = False
        """True once the process has answered `stands_still`, and so has started."""
        self._port: int | None = None

    @property
    def port(self) -> int:
        """The child's port, as soon as it listens. Raises RuntimeError if it ended before."""
        if self._port is None:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self._module} ended with exit code {self.process.wait()}")
            self._port = int(line)
        return self._port

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stands_still(self) -> bool:
        """Return True if a check has been unanswered for ANSWER_SECONDS, or three leases if longer. Call it often.

        Checks use a private connection: a stopped process keeps its port open, and other clients may crowd the port of
        a running process.
        """
        now = time.monotonic()
        with suppress(OSError):  # nothing is there, or the process has ended
            if self._pair.recv(1 << 10):
                self._ask_at, self._asked_at, self.has_answered = now + ASK_SECONDS, None, True
        if now >= self._ask_at:  # repeatedly: a process that is starting may miss the first
            self._ask_at = now + ASK_SECONDS
            self._asked_at = now if self._asked_at is None else self._asked_at
            with suppress(OSError):
                self._pair.send(ASK)
        return self._asked_at is not None and now - self._asked_at > self._patience_seconds

    def close(self, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for the process to end, then kill it. May be called twice."""
        end_process(self.process, seconds)
        self._pair.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def read_start() -> ProcessStart:
    """Read the configuration from standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=ProcessStart)


def end_with_parent() -> None:
    """End this process when its parent, and so its standard input, has ended; until then echo the parent's queries."""

    def watch() -> None:
        # Not through Python's buffer: interpreter shutdown would wait for its lock.
        while asked := os.read(0, 1):
            with suppress(OSError):
                os.write(0, asked)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
