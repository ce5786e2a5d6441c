"""Starting the coordinator and the agents: small processes that end with whoever started them. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from dilatant.resilience.job import Job
from dilatant.resilience.protocol.values import Settings

TOO_FEW_EXIT_CODE = 75
"""EX_TEMPFAIL: try again later, with more nodes."""
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
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for who started it
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(start)).encode() + b"\n")
        self.process.stdin.flush()
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

    def close(self, seconds: float = 0.0) -> None:
        """Let it end within some seconds, else end it. May be called twice."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def read_start() -> Start:
    """What standard input says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)


def end_with_parent() -> None:
    """End this process when whoever started it has: its standard input then does."""

    def watch() -> None:
        # Not through Python's buffer, whose lock the end of the interpreter would wait for.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def say(**values: Any) -> None:
    """To whoever started this process."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
