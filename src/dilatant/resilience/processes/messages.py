"""Messages between agents, workers and the coordinator, and the run's description among them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import msgspec

from dilatant.comm.wire import link
from dilatant.resilience.protocol import agent, values
from dilatant.resilience.protocol.values import ProtocolMessage, Settings

LEADER_SECONDS = 10.0
"""Least time without an answer before a standby takes over, so that a leader's coordinator has time for a restart."""


class Hello(ProtocolMessage, frozen=True):
    """The first message of a worker. index: among those of its node. pid: of its process."""

    index: int
    pid: int


class StoreAt(ProtocolMessage, frozen=True):
    """The store's new address, after a change of leader."""

    host: str
    port: int


class Warm(ProtocolMessage, frozen=True):
    """The worker can join a generation; it lacks only the state of the run."""


class Beat(ProtocolMessage, frozen=True):
    """Heartbeat: the worker is alive."""


class JobRequest(ProtocolMessage, frozen=True):
    """The first message of an agent, which knows only the coordinator's address; the answer is a `Job`."""


@dataclass(frozen=True, slots=True)
class TrainingStart:
    """Values with which the ranks begin training.

    config: YAML, with absolute paths. plan: JSON of the first generation's `TrainingPlan`. checkpoint: to start from,
    empty for none; discards: see `StartingPoint`. show: where the first rank shows its progress.
    """

    config: str
    plan: str
    checkpoint: str
    discards: bool
    show: str


@dataclass(frozen=True, slots=True)
class Job:
    """A run, for machines that share its folder and its data.

    store_port: of the ranks' store, on the coordinator's host. on_one_machine: servers listen on loopback only.
    workers: ranks of every machine. restarts: number of times each machine may rejoin. folder: of the coordinator's
    record. standby: HOST:PORT of the machine that takes over from a lost leader; empty for none.
    """

    training: TrainingStart
    store_port: int
    on_one_machine: bool
    workers: int
    restarts: int
    folder: str
    settings: Settings
    standby: str = ""

    @property
    def next_address(self) -> tuple[str, int] | None:
        """Host and port of `standby`."""
        return address_of(self.standby) if self.standby else None

    @property
    def leader_patience_seconds(self) -> float:
        """Seconds that a leader may be unresponsive before the standby takes over."""
        return max(LEADER_SECONDS, 3 * self.settings.lease_seconds)


MESSAGES: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(
    values.Status | values.Order | agent.Command | agent.Event | JobRequest | Job | Hello | StoreAt | Beat | Warm
)
connect = partial(link.connect, decoder=MESSAGES)
"""Connects to an agent or coordinator, see `link.connect`."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's connection to its agent. index: among its node's workers. port: on loopback. store_at: the store's
    address, if the worker is not connected yet (the leader may have changed). on_one_machine: all ranks of the store
    are on this machine."""

    node: str
    index: int
    port: int
    token: bytes = field(repr=False)
    store_at: StoreAt | None = None
    on_one_machine: bool = True


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """An agent's data for a worker, on standard input."""

    job: Job
    seat: Seat


def address_of(text: str) -> tuple[str, int]:
    """Split HOST:PORT, and remove the brackets of IPv6."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")
