"""Where a rank's decoded samples come from: one pool of processes on every machine, or the rank itself."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.data.blend import Blend
from dilatant.data.encode import Encoding
from dilatant.data.pool import InlineSource, Source, Waiting
from dilatant.data.pool_owner import PoolOwner
from dilatant.data.pool_source import join
from dilatant.data.workers import workers_of_machine


@dataclass(frozen=True, slots=True)
class Decoding:
    """How samples are decoded. workers: processes on every machine (None: as many as its cores leave room for; 0: the
    rank itself). seconds: longest that a sample may take. memory: bytes of decoded samples a rank holds ahead."""

    workers: int | None = None
    seconds: float = 60.0
    memory: int = 512 << 20


class MachineSource:
    """A `Source` of the pool of this rank's machine, which the lowest rank there owns; made by all ranks together.

    comm: None for a process alone.
    """

    def __init__(
        self, comm: Comm | None, datasets: Mapping[str, Blend], encoding: Encoding, how: Decoding
    ) -> None:
        hosts = [""] if comm is None else all_gather_object(comm, socket.gethostname())
        rank = 0 if comm is None else comm.rank
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        workers = workers_of_machine(how.workers, len(here))
        self._owner: PoolOwner | None = None
        if workers and datasets and rank == here[0]:
            self._owner = PoolOwner(datasets, encoding, workers, how.seconds)
        own = None if self._owner is None else self._owner.address
        address = own if comm is None else all_gather_object(comm, own)[here[0]]
        self._source: Source = (
            InlineSource(datasets, encoding)
            if address is None
            else join(address, how.memory, on_wait=partial(_report, rank))
        )
        self.ask, self.take, self.forget = self._source.ask, self._source.take, self._source.forget

    def close(self) -> None:
        """Leave the pool; its owner ends it."""
        self._source.close()
        if self._owner is not None:
            self._owner.close()


def _report(rank: int, waiting: Waiting) -> None:
    """To the terminal of any rank: what it waits for may be the disk of its machine alone."""
    print(f"rank {rank} waits {waiting}", file=sys.stderr, flush=True)
