"""Agent: the node's state machine between coordinator and workers; it reports only what all workers have reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict, replace

from dilatant.resilience.protocol.values import (
    DRAIN_SHARE,
    NO_STATE,
    Order,
    Phase,
    ProtocolMessage,
    Settings,
    Status,
    Task,
)


class GenerationMessage(ProtocolMessage, frozen=True):
    """A message that concerns one generation."""

    generation: int


class Fence(GenerationMessage, frozen=True):
    """Stop computing, and answer with `Stopped`."""


class Rebuild(Order, frozen=True):
    """Join the order's generation, and answer with `Made`. first_rank: rank of this node's first worker."""

    first_rank: int = 0


class Activate(GenerationMessage, frozen=True):
    """All nodes are ready: train."""


class Apply(GenerationMessage, frozen=True):
    """The step is committed: apply its update."""

    step: int


class End(ProtocolMessage, frozen=True):
    """The run is over, or (is_out) continues without this node."""

    reason: str
    is_out: bool = False


class SaveAndEnd(ProtocolMessage, frozen=True):
    """Save after the current step, and end with `Done`."""

    reason: str


class HandOver(GenerationMessage, frozen=True):
    """Stop computing, export the step's gradients for the other nodes, which continue as `generation` without this
    node, and answer with `HandedOver`."""


Command = Fence | Rebuild | Activate | Apply | SaveAndEnd | HandOver | End


class Stopped(GenerationMessage, frozen=True):
    """A worker has stopped; it holds generation `base`'s state after `applied` steps. prepared: a step that it could
    still apply."""

    base: int
    applied: int
    prepared: int | None = None


class Made(GenerationMessage, frozen=True):
    """A worker has built its part of a generation and holds its state after `applied` steps."""

    applied: int


class Computing(GenerationMessage, frozen=True):
    """A worker has its inputs and begins to compute a step, which should not take longer than `limit_seconds`."""

    step: int
    limit_seconds: float


class Prepared(GenerationMessage, frozen=True):
    """A worker has all gradients of a step. hashes: layer → hash of its gradients."""

    step: int
    hashes: Mapping[str, int] = {}


class Broken(GenerationMessage, frozen=True):
    """A worker cannot continue in this generation. accuses: the unresponsive node. fatal: no worker could continue."""

    reason: str
    accuses: str | None = None
    fatal: bool = False


class Done(GenerationMessage, frozen=True):
    """A worker has finished. early: why it ended before the run's last step; empty if it did not."""

    early: str = ""


class Died(ProtocolMessage, frozen=True):
    """A worker is gone."""

    reason: str


class Slow(GenerationMessage, frozen=True):
    """A worker is `times` slower than others, which exceeds the limit; 0: it no longer does."""

    times: float


class HandedOver(GenerationMessage, frozen=True):
    """A worker has exported its gradients for this generation, of which it is not a member."""


Event = Stopped | Made | Computing | Prepared | Broken | Done | Died | Slow | HandedOver


@dataclass(slots=True)
class _Deadline:
    """The time limit of a worker's step. since: the first tick after it began."""

    limit_seconds: float
    since: float | None = None


class Agent:
    """Receives orders, workers' events and the time; returns commands for all of its workers. `status` is sent to the
    coordinator repeatedly, and at once if `changed`.

    workers: number of workers; they have started, and hold no state.
    """

    def __init__(self, node: str, settings: Settings, workers: int = 1) -> None:
        self.settings = settings
        self.changed = True
        self.ended = ""
        self.is_out = False
        self._status = Status(node, 0, workers=workers)
        self._latest = (0, 0)
        self._answers: dict[int, Event] = {}
        self._prepared: dict[int, Prepared] = {}
        self._done: set[int] = set()
        self._handed_over: set[int] = set()
        self._deadlines: dict[int, _Deadline] = {}
        self._slow: dict[int, float] = {}
        self._stop_deadline = 0.0
        self._leaving_since: float | None = None
        self._is_ending = False

    @property
    def node(self) -> str:
        return self._status.node

    @property
    def generation(self) -> int:
        return self._status.generation

    @property
    def phase(self) -> Phase:
        return self._status.phase

    def status(self) -> Status:
        """Return the status for the coordinator."""
        self.changed = False
        return self._status

    def leave(self) -> None:
        """Announce that this node wants to leave; it leaves when the coordinator orders it out."""
        self._set(leaving=True)

    def obey(self, order: Order, now: float) -> list[Command]:
        """Return the commands for the workers that follow from an order."""
        commands = self._obey(order, now)
        if order.ending and not self.ended and not self._is_ending and order.node == self.node:
            self._is_ending = True
            return [SaveAndEnd(order.ending), *commands]
        return commands

    def _obey(self, order: Order, now: float) -> list[Command]:
        if order.node != self.node or (order.term, order.serial) <= self._latest or self.ended:
            return []
        self._latest = order.term, order.serial
        if order.task in (Task.OUT, Task.STOP):
            self.ended = order.reason or order.task.value
            self.is_out = order.task is Task.OUT
            return [End(self.ended, self.is_out)]
        own = self._status
        if own.phase in (Phase.HANDING_OVER, Phase.HANDED_OVER):
            return []
        if order.task is Task.HAND_OVER:
            self._deadlines.clear()
            self._set(generation=order.generation, phase=Phase.HANDING_OVER, ready_at=None, broken="", accuses=None)
            return [HandOver(order.generation)]
        if order.generation > own.generation:
            self._answers.clear()
            self._prepared.clear()
            self._done.clear()
            self._deadlines.clear()
            self._slow.clear()
            self._stop_deadline = self._fence_deadline(now)
            self._set(
                generation=order.generation,
                phase=Phase.FENCING,
                ready_at=None,
                broken="",
                accuses=None,
                done=False,
                slow=0.0,
            )
            return [Fence(order.generation)]
        if order.generation < own.generation or own.failed:
            return []
        if order.task is Task.REBUILD and own.phase is Phase.FENCED:
            self._answers.clear()
            self._set(phase=Phase.REBUILDING, prepared=None, hashes={})
            place = order.members.index(own.node)
            return [Rebuild(**asdict(order), first_rank=sum(order.workers[:place]))]
        if order.task is Task.RUN:
            return self._run(order)
        return []

    def on_event(self, worker: int, event: Event) -> list[Command]:
        """Handle an event of one worker; returns the commands for all workers that follow."""
        own = self._status
        if isinstance(event, Died):
            if not own.done and not self.ended and not own.failed:
                self._set(failed=event.reason)
        elif event.generation != own.generation:
            pass  # sent before the worker received the fence
        elif isinstance(event, Broken):
            if event.fatal:
                self._set(fatal=event.reason)
            elif own.phase in (Phase.RUNNING, Phase.REBUILDING, Phase.READY) and not own.broken:
                self._set(broken=event.reason, accuses=event.accuses)
        elif isinstance(event, Stopped | Made):
            if own.phase is (Phase.FENCING if isinstance(event, Stopped) else Phase.REBUILDING):
                self._answer(worker, event)
        elif isinstance(event, Computing):
            # Sent by another thread of the worker, it may arrive after the worker's `Prepared`.
            if own.phase is Phase.RUNNING and event.step == own.applied and worker not in self._prepared:
                self._deadlines[worker] = _Deadline(event.limit_seconds)
        elif isinstance(event, Prepared) and own.phase is Phase.RUNNING and event.step == own.applied:
            self._deadlines.pop(worker, None)
            self._prepared[worker] = event
            if len(self._prepared) == own.workers:
                hashes = {key: value for each in self._prepared.values() for key, value in each.hashes.items()}
                self._set(prepared=event.step, hashes=hashes)
        elif isinstance(event, Slow):
            self._slow[worker] = event.times
            self._set(slow=max(self._slow.values()))
        elif isinstance(event, HandedOver) and own.phase is Phase.HANDING_OVER:
            self._handed_over.add(worker)
            if len(self._handed_over) == own.workers:
                self._set(phase=Phase.HANDED_OVER)
        elif isinstance(event, Done) and own.phase is Phase.RUNNING:
            self._done.add(worker)
            if len(self._done) == own.workers:
                self._set(done=True, early=event.early)
        return []

    def tick(self, now: float) -> None:
        """Mark the node as failed if its workers do not stop in time, and as broken if a step exceeds its time
        limit."""
        own = self._status
        if own.failed or self.ended:
            return
        if own.phase is Phase.FENCING and now > self._stop_deadline:
            self._set(failed="its workers do not stop")
        if own.leaving:
            self._leaving_since = now if self._leaving_since is None else self._leaving_since
            left = self._leaving_since + self.settings.drain_seconds - now
            if not own.overdue and left < (1 - DRAIN_SHARE) * self.settings.drain_seconds:
                self._set(overdue=True)
            if left < 0:
                self._set(failed=f"it had to leave within {self.settings.drain_seconds:g} s")
        for worker, deadline in self._deadlines.items():
            deadline.since = now if deadline.since is None else deadline.since
            if now - deadline.since > deadline.limit_seconds and not own.broken:
                self._set(broken=f"its worker {worker} has computed a step for over {deadline.limit_seconds:.3g} s")
                return

    def _fence_deadline(self, now: float) -> float:
        """Return the deadline for workers to stop. A worker that builds stages or reads weights notices a fence only
        between two operations; a second fence during the first keeps a later deadline."""
        own, settings = self._status, self.settings
        if own.phase is Phase.REBUILDING:
            return now + max(settings.fence_seconds, settings.build_seconds)
        return max(now + settings.fence_seconds, self._stop_deadline if own.phase is Phase.FENCING else 0.0)

    def _run(self, order: Order) -> list[Command]:
        own = self._status
        if own.phase is Phase.READY:
            self._set(phase=Phase.RUNNING, base=own.generation, applied=order.committed, ready_at=None)
            return [Activate(own.generation)]
        if own.phase is Phase.RUNNING and order.committed == own.applied + 1 and own.prepared == own.applied:
            self._prepared.clear()
            was_changed = self.changed
            self._set(applied=order.committed, prepared=None, hashes={})
            # The coordinator decided this, so it can wait: the next status, one step later, has it.
            self.changed = was_changed
            return [Apply(own.generation, order.committed - 1)]
        return []

    def _answer(self, worker: int, event: Stopped | Made) -> None:
        self._answers[worker] = event
        if len(self._answers) < self._status.workers:
            return
        answers = list(self._answers.values())
        if isinstance(event, Made):
            if len({each.applied for each in answers if isinstance(each, Made)}) > 1:
                self._set(broken="its workers became ready at unlike steps")
            else:
                self._set(phase=Phase.READY, ready_at=event.applied)
            return
        stopped = [each for each in answers if isinstance(each, Stopped)]
        base = max(each.base for each in stopped)
        # All were prepared before any received `Apply`, so a worker that has not applied yet still can.
        applied = max(each.applied for each in stopped if each.base == base) if base != NO_STATE else 0
        prepared = applied if all(each.prepared == each.applied == applied for each in stopped) else None
        hashes = self._status.hashes if prepared == self._status.prepared else {}
        self._set(phase=Phase.FENCED, base=base, applied=applied, prepared=prepared, hashes=hashes)

    def _set(self, **values: Any) -> None:
        self._status = replace(self._status, serial=self._status.serial + 1, **values)
        self.changed = True
