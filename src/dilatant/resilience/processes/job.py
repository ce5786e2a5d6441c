"""What a machine has to know to become part of a run: asked of the coordinator by its agent. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from dilatant.resilience.protocol.values import Message, Settings


class Ask(Message, frozen=True):
    """The first message of an agent that knows nothing but where the coordinator is; the answer is a `Job`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run, for machines that share its folder and its data.

    config: YAML, with absolute paths. plan: JSON of the first generation's `TrainingPlan`. checkpoint: to begin with,
    empty for none; discards: see `training.starting_point.Start`. store_port: of the store of all ranks, on the host of
    the coordinator. on_one_machine: nothing has to listen to others. workers: ranks of every machine. restarts: how
    often each machine joins again. folder: of the coordinator's record. show: where the first rank shows its progress.
    standby: HOST:PORT where another leads when this one is gone; empty for none.
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
        """`standby` as host and port."""
        return address_of(self.standby) if self.standby else None

    @property
    def leader_patience_seconds(self) -> float:
        """How long a leader may be silent that has a standby."""
        return max(self.settings.leader_seconds, 3 * self.settings.lease_seconds)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What an agent tells a worker on its standard input. agent_port: on loopback; host: of coordinator and store."""

    job: Job
    node: str
    index: int
    agent_port: int
    host: str
    token: str


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT as its parts, without the brackets of IPv6."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    return host in ("localhost", "::1") or host.startswith("127.")
