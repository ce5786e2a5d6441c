"""Job: the description of a run that the coordinator sends to an agent that joins. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.resilience.protocol.values import ProtocolMessage, Settings


class JobRequest(ProtocolMessage, frozen=True):
    """The first message of an agent, which knows only the coordinator's address; the answer is a `Job`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run, for machines that share its folder and its data.

    config: YAML, with absolute paths. plan: JSON of the first generation's `TrainingPlan`. checkpoint: to start from,
    empty for none; discards: see `training.starting_point.Start`. store_port: of the ranks' store, on the coordinator's
    host. on_one_machine: servers listen on loopback only. workers: ranks of every machine. restarts: number of times
    each machine may rejoin. folder: of the coordinator's record. show: where the first rank shows its progress.
    standby: HOST:PORT of the machine that takes over from a lost leader; empty for none.
    """

    config: str
    plan: str
    checkpoint: str
    discards: bool
    store_port: int
    on_one_machine: bool
    workers: int
    restarts: int
    folder: str
    show: str
    settings: Settings
    standby: str = ""

    @property
    def next_address(self) -> tuple[str, int] | None:
        """Host and port of `standby`."""
        return address_of(self.standby) if self.standby else None

    @property
    def leader_patience_seconds(self) -> float:
        """Seconds that a leader may be unresponsive before the standby takes over."""
        return max(self.settings.leader_seconds, 3 * self.settings.lease_seconds)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """An agent's data for a worker, on standard input. agent_port: on loopback. host: of coordinator and store."""

    job: Job
    node: str
    index: int
    agent_port: int
    host: str
    token: str


def address_of(text: str) -> tuple[str, int]:
    """Split HOST:PORT, and remove the brackets of IPv6."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")
