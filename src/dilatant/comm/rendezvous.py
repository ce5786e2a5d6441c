"""How the ranks of a generation find each other: under a name that no earlier attempt has used.

A generation may be joined again and again, also after one rank or all have failed: each time under a fresh id, which
the first rank draws when all are there. Everything that communicates is keyed by it, so nothing stale is ever met.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from dilatant.comm.errors import CommAborted
from dilatant.comm.liveness import send_abort
from dilatant.comm.store.store import Store

WORD_AFTER = timedelta(seconds=30)
"""After which whoever waits for others says so."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Membership:
    """One attempt of a generation. inboxes, machines: by rank. A machine is its host name and its boot, since names
    alone may repeat."""

    id: str
    inboxes: tuple[str, ...]
    machines: tuple[str, ...]


def register_inbox(store: Store, generation: int, rank: int, size: int) -> str:
    """Name an inbox of this rank that failures are announced to from now on.

    Raises CommAborted when one was announced to this generation already.
    """
    inbox = f"inbox/{uuid4().hex}"
    keys = ["generation", f"generation/{generation}/inbox/{rank}"]
    store.multi_set(keys, [f"{generation} {size}", inbox])
    # After the inbox is known: an announcement that did not find it is found here.
    failed = f"generation/{generation}/failed"
    if store.check([failed]):
        raise CommAborted(store.get(failed).decode())
    return inbox


def join(store: Store, generation: int, rank: int, size: int, inbox: str, timeout: timedelta) -> Membership:
    """Return when all ranks have joined. Raises TimeoutError or StoreGone."""
    prefix = f"generation/{generation}"
    own = f"{prefix}/join/{rank}"
    store.set(own, json.dumps([inbox, this_machine()]))
    try:
        if rank == 0:
            keys = [f"{prefix}/join/{other}" for other in range(size)]
            _await_all(store, keys, timeout)
            inboxes, machines = zip(*(json.loads(each) for each in store.multi_get(keys)))
            membership = Membership(uuid4().hex, inboxes, machines)
            for key in keys:
                store.delete_key(key)
            document = json.dumps([membership.id, inboxes, machines])
            store.multi_set([f"started/{each}" for each in inboxes], [document] * size)
            store.set(f"{prefix}/started", membership.id)
            return membership
        store.wait([f"started/{inbox}"], timeout)
    except TimeoutError:
        store.delete_key(own)
        raise
    name, inboxes, machines = json.loads(store.get(f"started/{inbox}"))
    return Membership(name, tuple(inboxes), tuple(machines))


def _await_all(store: Store, keys: list[str], timeout: timedelta) -> None:
    """Wait for the keys of all ranks, and say once on stderr who is missing. Raises TimeoutError."""
    try:
        return store.wait(keys, min(timeout, WORD_AFTER))
    except TimeoutError:
        if timeout <= WORD_AFTER:
            raise
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    names = f"rank {', '.join(missing[:16])}" + (
        f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    )
    print(f"waits for {names} to join, up to {timeout.total_seconds():g} s", file=sys.stderr, flush=True)
    store.wait(keys, timeout - WORD_AFTER)


def this_machine() -> str:
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"


def known_inboxes(store: Store, generation: int, size: int) -> dict[int, str]:
    """The newest inbox of each rank that has one."""
    keys = {rank: f"generation/{generation}/inbox/{rank}" for rank in range(size)}
    return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}


def end_generation(store: Store, generation: int, rank: int, reason: str) -> None:
    """End a rank's own communication of a generation, whether it has begun it, is about to, or is joining."""
    store.set(f"generation/{generation}/failed", reason)
    key = f"generation/{generation}/inbox/{rank}"
    if store.check([key]):
        send_abort(store, store.get(key).decode(), reason)


def announce_failure(store: Store, reason: str) -> bool:
    """End communication of the newest generation on all ranks; for a launcher that saw a worker die.

    Returns whether they had all begun to communicate: otherwise they have not done anything together yet.
    """
    if not store.check(["generation"]):
        return False
    generation, size = map(int, store.get("generation").split())
    store.set(f"generation/{generation}/failed", reason)
    for inbox in known_inboxes(store, generation, size).values():
        send_abort(store, inbox, reason)
    return store.check([f"generation/{generation}/started"])
