"""Link probe: measure links between ranks by round trips of messages of several sizes, on training's communicators."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.group import Group
from dilatant.comm.launch import Worker
from dilatant.cost.hardware import Link, fit_link

SIZES = tuple(1 << power for power in (10, 14, 17, 20, 22, 24))
"""Message sizes in bytes: from a few rows of a tiny model to a long row of a large one."""
_REPEATS = 25


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """Fitted link. `error`: largest relative error of the fit. `pairs`: pairs of ranks that sent simultaneously."""

    link: Link
    error: float
    pairs: int


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Links `inside` a node and `between` nodes; None if no two ranks are placed so. `alone`: one pair of ranks of two
    nodes while no other sends, which is the speed of one port."""

    inside: MeasuredLink | None
    between: MeasuredLink | None
    alone: MeasuredLink | None = None

    @property
    def ports(self) -> int | None:
        """Number of ports of a node that its ranks have filled together; None if not measured."""
        if self.between is None or self.alone is None:
            return None
        return max(1, round(self.between.link.bandwidth / self.alone.link.bandwidth))


def measure_links(worker: Worker) -> MeasuredLinks:
    """Measure the links between the ranks of a launch; called by all of them, with the same result on each.

    Inside a node two neighbours send alone. Between nodes every rank of the first node sends to its peer on the second
    at the same time, because they share the way out: bandwidths add up. Then one pair sends alone.
    """
    comm = Comm(worker.store, worker.rank, worker.size, device=worker.device)
    try:
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(all_gather_object(comm, socket.gethostname())):
            hosts.setdefault(host, []).append(rank)
        nodes = list(hosts.values())
        near = next(([(ranks[0], ranks[1])] for ranks in nodes if len(ranks) > 1), [])
        far = list(zip(nodes[0], nodes[1])) if len(nodes) > 1 else []
        return MeasuredLinks(
            _measured(comm, "inside", near), _measured(comm, "between", far), _measured(comm, "alone", far[:1])
        )
    finally:
        comm.close()


def _measured(comm: Comm, name: str, pairs: list[tuple[int, int]]) -> MeasuredLink | None:
    own = next((pair for pair in pairs if comm.rank in pair), None)
    group = comm.group(f"link {name} {own[0]} {own[1]}", own) if own else None
    comm.world.barrier()
    mine = None
    if group is not None and own is not None:
        link, error = fit_link(SIZES, [_seconds(comm, group, own, size) for size in SIZES])
        mine = {**asdict(link), "error": error} if comm.rank == own[0] else None
    found = [one for one in all_gather_object(comm, mine) if one]
    if not found:
        return None
    link = Link(bandwidth=sum(one["bandwidth"] for one in found), latency=max(one["latency"] for one in found))
    return MeasuredLink(link, max(one["error"] for one in found), len(found))


def _seconds(comm: Comm, group: Group, pair: tuple[int, int], size: int) -> float:
    """Return half of the median round-trip time of a message of `size` bytes."""
    message = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    first = comm.rank == pair[0]
    other = pair[1] if first else pair[0]
    times = []
    for _ in range(_REPEATS + 2):
        began = time.perf_counter()
        for sends in (first, not first):
            transfer = group.send(message, other) if sends else group.receive(message, other)
            transfer.wait()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append((time.perf_counter() - began) / 2)
    return sorted(times[2:])[_REPEATS // 2]
