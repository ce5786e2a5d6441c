"""Starting the coordinator and the agents: small processes that end with whoever started them. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from dilatant.resilience.processes.job import Job
from dilatant.resilience.protocol.values import Settings

TOO_FEW_EXIT_CODE = 75
"""EX_TEMPFAIL: try again later, with more nodes."""
ASK = b"?"
ASK_SECONDS, ANSWER_SECONDS = 5.0, 10.0
"""How often a process is asked whether it stands still, and what it has to answer at least."""
SUPERSEDED_EXIT_CODE, NO_MAJORITY_EXIT_CODE = 3, 4
"""Of coordinators: another one leads; too few members came to lead them."""


@dataclass(frozen=True, slots=True)
class Start:
    """What such a process is told on its standard input, for the command line shows to everybody.

    folder: of the coordinator's record, and where agents write who they are. port: to listen on (0: any); of an agent,
    that of the coordinator at `host`. token: hexadecimal. node: an agent's name. workers: how many it has.
    patience_seconds: how long an agent does without a coordinator; 0: for ever, since it ends with whoever started it.
    job: for agents that ask the coordinator; of an agent, what it was told. majority_seconds: of a standby's
    coordinator, what more than half of the last members have to come to it before it leads.
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


class Child:
    """A process of ours, running `module`, as the one that started it sees it."""

    def __init__(self, module: str, start: Start) -> None:
        self._module = module
        self._pair, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for who started it
            )
        with suppress(OSError):  # it has ended already
            self._pair.sendall(json.dumps(asdict(start)).encode() + b"\n")
        self._pair.setblocking(False)
        self._patience_seconds = max(ANSWER_SECONDS, 3 * start.settings.lease_seconds)
        self._ask_at = time.monotonic()
        self._asked_at: float | None = None
        self.has_answered = False
        """Whether the process has answered `stands_still` once, and so has begun."""
        self._said: dict[str, Any] | None = None

    @property
    def port(self) -> int:
        """Where it listens, once it does. Raises RuntimeError when it ended before."""
        if self._said is None:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self._module} ended with exit code {self.process.wait()}")
            self._said = json.loads(line)
        return int(self._said["port"])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stands_still(self) -> bool:
        """Return True when the process has owed an answer for ANSWER_SECONDS, or three leases. To be called often.

        It is asked over a connection that no other process has: a stopped one still has its port, and strangers may
        crowd the port of one that works.
        """
        now = time.monotonic()
        with suppress(OSError):  # nothing is there, or the process has ended
            if self._pair.recv(1 << 10):
                self._ask_at, self._asked_at, self.has_answered = now + ASK_SECONDS, None, True
        if now >= self._ask_at:  # again, too: one that is starting may miss the first
            self._ask_at = now + ASK_SECONDS
            self._asked_at = now if self._asked_at is None else self._asked_at
            with suppress(OSError):
                self._pair.send(ASK)
        return self._asked_at is not None and now - self._asked_at > self._patience_seconds

    def close(self, seconds: float = 0.0) -> None:
        """Let it end within some seconds, else end it. May be called twice."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pair.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def read_start() -> Start:
    """What standard input says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)


def end_with_parent() -> None:
    """End this process when whoever started it has: its standard input then does. Meanwhile, answer what it asks."""

    def watch() -> None:
        # Not through Python's buffer, whose lock the end of the interpreter would wait for.
        while asked := os.read(0, 1):
            with suppress(OSError):
                os.write(0, asked)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def say(**values: Any) -> None:
    """To whoever started this process."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
