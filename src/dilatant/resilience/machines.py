"""Machines of a run over several machines, as the leader sees them: where they come from and whether they begin."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console

from dilatant.comm.errors import WorkerFailed
from dilatant.comm.store.token import shared_token
from dilatant.report.say import say
from dilatant.resilience.processes.messages import is_loopback
from dilatant.resilience.processes.process import end_process

LOOPBACK = "127.0.0.1"
LEADER_LAST_SECONDS = 10.0
"""Time for the coordinator and the agents that a leader started to end after the run."""


@dataclass(frozen=True, slots=True)
class LeaderAddresses:
    """The leader's addresses. host, port: where the coordinator listens; host "" for all addresses, port 0 for any.
    name: host name for others."""

    host: str
    port: int
    name: str


class Machines(Protocol):
    """Source of a run's machines. token: the secret that they share with the leader."""

    @property
    def token(self) -> bytes: ...

    def start(self, leader: LeaderAddresses, count: int, console: Console) -> None:
        """Start as many agents as the run begins with, or wait for them. The coordinator listens already. Raises
        UserError if there are too few machines."""

    def watch(self, has_begun: bool) -> None:
        """Look after the agents; call it often. Raises WorkerFailed if one fails before the run has begun."""

    def close(self) -> None:
        """End the agents that were started here, some seconds after the run. May be called twice."""


class ArrivingMachines:
    """`Machines` whose agents are started elsewhere, by people or a launcher."""

    @property
    def token(self) -> bytes:
        return shared_token()

    def start(self, leader: LeaderAddresses, count: int, console: Console) -> None:
        say(console, f"waits for {count} other machines at {leader.name}:{leader.port}")

    def watch(self, has_begun: bool) -> None:
        pass

    def close(self) -> None:
        pass


class LaunchedMachines(ArrivingMachines):
    """`Machines` of a launcher, of which this is the first: it leads, and trains like the others."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self, leader: LeaderAddresses, count: int, console: Console) -> None:
        host = leader.host if is_loopback(leader.host) else LOOPBACK
        self._agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "dilatant", "agent", "--coordinator", f"{host}:{leader.port}"],
            start_new_session=True,  # Ctrl-C goes to this process, which makes all ranks end
        )
        super().start(leader, count - 1, console)

    def watch(self, has_begun: bool) -> None:
        if self._agent is not None and not has_begun and self._agent.poll():
            raise WorkerFailed("this machine's agent has failed; what it said is above")

    def close(self) -> None:
        if self._agent is not None:
            end_process(self._agent, LEADER_LAST_SECONDS)
