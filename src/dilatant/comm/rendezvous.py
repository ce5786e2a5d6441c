"""Rendezvous: the ranks of a generation find each other under an id that no earlier attempt has used.

Ranks may join a generation repeatedly, also after one or all have failed: each attempt gets a fresh id, which rank 0
draws when all ranks are present and which each of them accepts. All communication is keyed by this id, so no attempt
sees stale messages. Each rank has an inbox in the store, read by its own thread even while the main thread waits: a
message either asks what the rank is doing, or says that communication was aborted and why.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from dilatant.comm.errors import CommAborted
from dilatant.comm.store.store import Store

NOTICE_AFTER = timedelta(seconds=30)
"""Time after which rank 0 prints which ranks it still waits for."""
CHECK_AFTER = timedelta(seconds=0.5)
"""Time after which rank 0 looks whether a rank that has not accepted an offer joins anew."""
BEGIN = "begin"
ANSWER_SECONDS = 2.0
"""Time limit for the answer to a liveness check. An idle machine needs a millisecond, a loaded one more."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One attempt at a generation. inboxes, machines: by rank. A machine is identified by host name and boot id, since
    host names may repeat."""

    id: str
    inboxes: tuple[str, ...]
    machines: tuple[str, ...]


def register_inbox(store: Store, generation: int, rank: int, size: int) -> str:
    """Create an inbox for this rank, to which failures are announced from now on.

    Raises CommAborted if a failure of this generation was announced already.
    """
    inbox = f"inbox/{uuid4().hex}"
    keys = ["generation", f"generation/{generation}/inbox/{rank}"]
    store.multi_set(keys, [f"{generation} {size}", inbox])
    # Check after registering the inbox, to find a failure that was announced before.
    failed = f"generation/{generation}/failed"
    if store.check([failed]):
        raise CommAborted(store.get(failed).decode())
    return inbox


def join(
    store: Store,
    generation: int,
    rank: int,
    size: int,
    inbox: str,
    timeout: timedelta,
    offered: Callable[[Rendezvous], None] = lambda offer: None,
) -> Rendezvous:
    """Wait until all ranks have joined and have said so. Raises TimeoutError or StoreGone.

    A rank that was killed or aborted while it joined leaves its entry behind. Rank 0 therefore offers an attempt to all
    entries, begins it when every rank has accepted, and offers another one where an entry has been replaced.
    `offered` is called with each offer before it is accepted.
    """
    own = _entry(generation, rank)
    store.set(own, json.dumps([inbox, this_machine()]))
    try:
        if rank == 0:
            offer = _gather(store, [_entry(generation, other) for other in range(size)], offered, timeout)
            store.set(f"generation/{generation}/started", offer.id)
            return offer
        return _accept(store, rank, inbox, offered, timeout)
    except TimeoutError:
        store.delete_key(own)
        raise


def _entry(generation: int, rank: int) -> str:
    return f"generation/{generation}/join/{rank}"


def _gather(store: Store, entries: list[str], offered: Callable[[Rendezvous], None], timeout: timedelta) -> Rendezvous:
    """Rank 0's half of `join`."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        _await_all(store, entries, _until(deadline))
        if (present := _read(store, entries)) is None:
            continue
        inboxes, machines = zip(*map(json.loads, present))
        offer = Rendezvous(uuid4().hex, inboxes, machines)
        offered(offer)
        document = json.dumps([offer.id, inboxes, machines])
        for inbox in inboxes[1:]:
            store.push(f"offers/{inbox}", document)
        acceptances = [f"{offer.id}/accepted/{rank}" for rank in range(1, len(entries))]
        while _read(store, entries) == present:
            try:
                store.wait(acceptances, min(_until(deadline), CHECK_AFTER))
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                raise
            if _read(store, entries) != present:
                break  # a rank that accepted was aborted since and has joined anew
            for key in entries:
                store.delete_key(key)
            for inbox in inboxes[1:]:
                store.push(f"offers/{inbox}", BEGIN)
            return offer


def _read(store: Store, entries: list[str]) -> list[bytes] | None:
    """Return the entries, all as of one moment, or None if one was withdrawn."""
    try:
        return store.multi_get(entries, timedelta(0))
    except TimeoutError:
        return None


def _accept(
    store: Store, rank: int, inbox: str, offered: Callable[[Rendezvous], None], timeout: timedelta
) -> Rendezvous:
    """Another rank's half of `join`: accept each offer until rank 0 begins one."""
    deadline = time.monotonic() + timeout.total_seconds()
    offer = None
    while True:
        message = store.pop(f"offers/{inbox}", _until(deadline)).decode()
        if message == BEGIN and offer is not None:
            return offer
        name, inboxes, machines = json.loads(message)
        offer = Rendezvous(name, tuple(inboxes), tuple(machines))
        offered(offer)
        store.set(f"{name}/accepted/{rank}", b"")


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.0, deadline - time.monotonic()))


def _await_all(store: Store, keys: list[str], timeout: timedelta) -> None:
    """Wait for the keys of all ranks; print once to stderr which ranks are missing. Raises TimeoutError."""
    try:
        return store.wait(keys, min(timeout, NOTICE_AFTER))
    except TimeoutError:
        if timeout <= NOTICE_AFTER:
            raise
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    names = f"rank {', '.join(missing[:16])}" + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    print(f"waits for {names} to join, up to {round(timeout.total_seconds(), 1):g} s", file=sys.stderr, flush=True)
    store.wait(keys, timeout - NOTICE_AFTER)


def this_machine() -> str:
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"


def known_inboxes(store: Store, generation: int, size: int) -> dict[int, str]:
    """Return the newest inbox of each rank that has one."""
    keys = {rank: f"generation/{generation}/inbox/{rank}" for rank in range(size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def end_generation(store: Store, generation: int, rank: int, reason: str) -> None:
    """Abort one rank's communication of a generation: before, during or after its rendezvous."""
    store.set(f"generation/{generation}/failed", reason)
    key = f"generation/{generation}/inbox/{rank}"
    if store.check([key]):
        send_abort(store, store.get(key).decode(), reason)


def announce_failure(store: Store, reason: str) -> bool:
    """Abort communication of the newest generation on all ranks; called by a launcher that saw a worker die.

    Returns True if all ranks had begun to communicate; otherwise they have not done any work together yet.
    """
    if not store.check(["generation"]):
        return False
    generation, size = map(int, store.get("generation").split())
    store.set(f"generation/{generation}/failed", reason)
    for inbox in known_inboxes(store, generation, size).values():
        send_abort(store, inbox, reason)
    return store.check([f"generation/{generation}/started"])


def send_abort(store: Store, inbox: str, reason: str) -> None:
    """Notify the rank that reads `inbox` that communication was aborted."""
    store.push(inbox, json.dumps({"abort": reason}))


def read_inbox(store: Store, inbox: str) -> tuple[str, str]:
    """Wait for the next message: ("abort", reason) or ("answer", queue for the answer). Raises StoreGone."""
    ((kind, text),) = json.loads(store.pop(inbox)).items()
    return kind, text


def answer_check(store: Store, where: str, rank: int, activity: str) -> None:
    """Answer a liveness check with this rank's activity."""
    store.push(where, json.dumps([rank, activity]))


def check_liveness(store: Store, inboxes: Mapping[int, str]) -> dict[int, str]:
    """Ask ranks what they are doing; return the activity of each rank that answers in time. inboxes: by rank."""
    where = f"answers/{uuid4().hex}"
    for inbox in inboxes.values():
        store.push(inbox, json.dumps({"answer": where}))
    answers: dict[int, str] = {}
    deadline = time.monotonic() + ANSWER_SECONDS
    while len(answers) < len(inboxes):
        left = deadline - time.monotonic()
        try:
            rank, activity = json.loads(store.pop(where, timedelta(seconds=max(0.0, left))))
        except TimeoutError:
            break
        answers[rank] = activity
    return answers
