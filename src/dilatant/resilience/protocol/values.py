"""Messages between agents and the coordinator, and the coordinator's record on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

NO_STATE = -1
"""The base of a node that has no state of the run yet."""


ASKED = "it was asked to stop"
"""Reason to save and end a run after a stop request."""
FINISHED = "finished"
"""Reason to stop a run whose nodes have all finished."""
TOO_FEW = "left of the"
"""Part of the reason to stop a run that has too few nodes (see `too_few`)."""
FAILS_AGAIN = "the same layout failed twice"
"""Begin of the reason to stop a run that was saved because an error repeats."""
GOES_ON = "`dilatant resume` goes on from it"
"""End of the reason to stop a run that was saved because no plan of the nodes that are left can go on."""
DRAIN_SHARE = 0.75
"""Fraction of a leaving node's time for which it waits for the end of the step; the rest is for exporting gradients."""


def too_few(left: int, needed: str) -> str:
    """Return the reason to stop a run that has `left` nodes and needs the number of nodes described by `needed`."""
    return f"{left} {'node is' if left == 1 else 'nodes are'} {TOO_FEW} {needed}"


def may_resume(reason: str) -> bool:
    """Return True if a run that stopped for this reason, or that runs (empty), may be resumed: its end was no mistake
    of the user."""
    is_saved = reason.startswith(FAILS_AGAIN) or GOES_ON in reason
    return reason in ("", ASKED) or TOO_FEW in reason or is_saved


class ProtocolMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of messages: on the wire a message is its type name and its fields in order, each checked when it is read.

    Structs, not dataclasses: creating and changing them takes a tenth of the time, and steps wait for some messages.
    """


class Phase(StrEnum):
    """The phase of a node in its generation. fresh: it has none. fencing: its workers are being stopped. fenced: they
    have stopped. rebuilding: they open groups and copy state. ready: they hold all state. running: they train. handing
    over: the node must leave before the end of the step, and exports its gradients. handed over: it has done so."""

    FRESH = "fresh"
    FENCING = "fencing"
    FENCED = "fenced"
    REBUILDING = "rebuilding"
    READY = "ready"
    RUNNING = "running"
    HANDING_OVER = "handing over"
    HANDED_OVER = "handed over"


class Task(StrEnum):
    """The coordinator's order to the nodes of a generation. hand over: this node is no longer a member, and must export
    its gradients of the step. out: this node is no member, and must rejoin under a new name. stop: the run is over."""

    WAIT = "wait"
    FENCE = "fence"
    REBUILD = "rebuild"
    RUN = "run"
    HAND_OVER = "hand over"
    OUT = "out"
    STOP = "stop"


class Status(ProtocolMessage, frozen=True):
    """A node's report, the coordinator's only information about the node.

    node: a unique name, changed at every restart. serial: increases with every change. generation: the latest whose
    orders it obeys. base: the generation whose state its workers hold; applied: number of steps in that state.
    ready_at: number of steps in the state that it has built for `generation`; it holds both states until it runs.
    prepared: the step of which all its workers have the gradients; hashes: layer → hash of these gradients. accuses:
    the unresponsive node that its workers wait for. broken: why they cannot continue in this generation. failed: why
    this node cannot continue at all. fatal: why no node can (a mistake of the user). leaving: it leaves at the end of
    the step; overdue: it cannot wait for that any longer. done: its workers have finished; early: why they ended before
    the last step, if they did. slow: how many times slower than others it is, if above the limit.
    """

    node: str
    serial: int
    generation: int = 0
    phase: Phase = Phase.FRESH
    base: int = NO_STATE
    applied: int = 0
    ready_at: int | None = None
    prepared: int | None = None
    hashes: Mapping[str, int] = {}
    accuses: str | None = None
    broken: str = ""
    failed: str = ""
    fatal: str = ""
    leaving: bool = False
    overdue: bool = False
    done: bool = False
    workers: int = 1
    slow: float = 0.0
    early: str = ""


class Order(ProtocolMessage, frozen=True):
    """The coordinator's instructions to a node. term, serial: a later order has a greater pair.

    members: of a generation to be rebuilt, in rank order, previous members first; workers: number of workers of each
    member. Other orders, one per step and node, omit both. base, committed: the state to continue from: its generation
    and its number of steps. In a running generation `committed` grows as steps are committed, and a node that has
    prepared the last one applies it. ending: why all must save and end. doubted: replicas had different gradients in
    the current step, so that no gradient may be reused.
    """

    node: str
    term: int
    serial: int
    task: Task
    generation: int = 0
    members: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    base: int = NO_STATE
    committed: int = 0
    reason: str = ""
    ending: str = ""
    doubted: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The coordinator's state on disk, written before orders that depend on it. term: grows with every coordinator that
    takes over. ending: why all save and end; stopped: why they have ended."""

    term: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()
    stopped: str = ""
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Persist:
    """Effect: write the record before sending any later order."""

    record: Record


Effect = Persist | Order


@dataclass(frozen=True, slots=True)
class Settings:
    """Time limits and sizes of the protocol.

    lease_seconds: a node without a message for longer is lost. fence_seconds: limit for workers to stop; build_seconds:
    the limit, if longer, while they build a generation. join_seconds: wait for more newcomers after the first.
    return_seconds: limit for members to return to a restarted coordinator. initial: nodes at the start. fewest: with
    fewer the run is saved and ends. attempts: generations in a row without a step before a node is blamed; after twice
    as many, the run stops. drain_seconds: time of a leaving node: it waits `DRAIN_SHARE` of it for the step to end and
    exports its gradients in the rest; then the others continue. accuse_seconds: time for more reports of an
    unresponsive node.
    """

    lease_seconds: float = 3.0
    fence_seconds: float = 5.0
    build_seconds: float = 60.0
    join_seconds: float = 5.0
    return_seconds: float = 10.0
    drain_seconds: float = 600.0
    accuse_seconds: float = 0.5
    initial: int = 1
    fewest: int = 1
    attempts: int = 3
