"""What agents and the coordinator say to each other, and what the coordinator writes down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

NO_STATE = -1
"""The base of a node that holds nothing of the run yet."""


ASKED = "it was asked to stop"
"""Why all save and end whose run was asked to."""
FINISHED = "finished"
"""Why a run stops whose nodes are all done."""
TOO_FEW = "nodes are left of the"
"""In the reason of a run that stops since there are too few."""
DRAIN_SHARE = 0.75
"""Of the time that a node has to leave: what it waits for the end of the step. The rest is for handing over."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What travels: on the wire its name and its fields in order, each of them checked when it is read.

    Structs and not dataclasses, for a step waits for some of them: they are made and changed in a tenth of the time.
    """


class Phase(StrEnum):
    """Where a node is in its generation. fresh: in none. fencing: its workers are being stopped. fenced: they stand
    still. rebuilding: they make groups and copy state. ready: they hold all that they need. running: they train.
    giving: the node has to go before the end of the step, and writes down what it has finished of it. given: it has."""

    FRESH = "fresh"
    FENCING = "fencing"
    FENCED = "fenced"
    REBUILDING = "rebuilding"
    READY = "ready"
    RUNNING = "running"
    GIVING = "giving"
    GIVEN = "given"


class Task(StrEnum):
    """What the coordinator wants of the members of a generation. give: this node is none of them any more, and is to
    hand over what it has finished of the step. out: this node is none of them, and has to start anew. stop: the run is
    over."""

    WAIT = "wait"
    FENCE = "fence"
    REBUILD = "rebuild"
    RUN = "run"
    GIVE = "give"
    OUT = "out"
    STOP = "stop"


class Status(Message, frozen=True):
    """All that a coordinator knows of a node.

    node: a name that no other process, nor this one after a restart, ever has. serial: grows with every change.
    generation: the newest one that it obeys. base: the generation whose state its workers hold, and applied: the steps
    in that. ready_at: the steps in the state that it has made ready for `generation`; it holds both until it runs.
    prepared: the number of the step whose gradients all its workers have; hashes: layer → hash of these gradients.
    accuses: the node that its workers wait for in vain. broken: why they cannot go on in this generation.
    failed: why this node cannot go on at all. fatal: why nobody can (a mistake of the user). leaving: it goes at the
    end of the step; overdue: it cannot wait for that any longer. slow: how many times slower than others it is, where
    that is too much.
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


class Order(Message, frozen=True):
    """All that a node is to know. term, serial: a later order has a greater pair.

    members: of a generation that is to be rebuilt, those that ran before first, in the order of ranks; workers: of
    each. Other orders, one a step to each of them, do not have them. base, committed:
    the state to go on from: the generation that ran it, and its steps. In a running generation `committed` grows as
    steps are committed, and whoever has prepared the last one applies it. ending: why all are to save and end. doubted:
    replicas had unlike gradients of the step in hand, so that none of them are to be kept.
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
    """What a coordinator has on disk before anybody hears of it. term: grows with every coordinator that takes over.
    ending: why all save and end; stopped: why they have."""

    term: int = 0
    generation: int = 0
    members: tuple[str, ...] = ()
    stopped: str = ""
    ending: str = ""


@dataclass(frozen=True, slots=True)
class Persist:
    """Write this down before any order after it is sent."""

    record: Record


Effect = Persist | Order


@dataclass(frozen=True, slots=True)
class Settings:
    """lease_seconds: a node that is silent for longer is lost. fence_seconds: what workers have to stand still;
    build_seconds: those that are being made ready for a generation, where that is more.
    join_seconds: newcomers are awaited after the first of them. return_seconds: what the members have to come back to
    a coordinator that did. initial: nodes to begin with. fewest: with fewer all save and the run ends. attempts:
    generations in a row that end without a step before somebody is blamed, and twice that before the run stops.
    drain_seconds: what a node that leaves has. It waits `DRAIN_SHARE` of that for the end of the step, and hands over
    what it has finished of it in the rest; then the others go on without it.
    accuse_seconds: after somebody waited in vain for another, what the others have to say for whom they do.
    leader_seconds: how long a leader that has a standby may be silent at least; its coordinator starts again meanwhile.
    """

    lease_seconds: float = 3.0
    fence_seconds: float = 5.0
    build_seconds: float = 60.0
    join_seconds: float = 5.0
    return_seconds: float = 10.0
    resend_seconds: float = 1.0
    drain_seconds: float = 600.0
    accuse_seconds: float = 0.5
    leader_seconds: float = 10.0
    initial: int = 1
    fewest: int = 1
    attempts: int = 3
