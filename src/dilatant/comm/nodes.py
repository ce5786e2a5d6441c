"""Which ranks share a machine."""

from __future__ import annotations

import socket
from pathlib import Path

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def nodes_of(comm: Comm) -> tuple[int, ...]:
    """The node of every rank, numbered in the order of their first ranks; called by all ranks.

    Ranks are on one node if host name and boot are the same: names alone may repeat.
    """
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.is_file() else ""
    places = [tuple(place) for place in all_gather_object(comm, [socket.gethostname(), boot])]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(numbers[place] for place in places)
