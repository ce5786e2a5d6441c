"""Sources of a rank's decoded samples: a worker pool on every machine, a Ray cluster, or the rank itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.comm.ray_cluster import Connection, cluster_address
from dilatant.config import DataConfig, UserError
from dilatant.data.sample import Dataset
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import warm_up, workers_of_machine
from dilatant.data.workers.pool import InlineSource, SampleSource, Waiting
from dilatant.data.workers.pool_owner import PoolOwner
from dilatant.data.workers.pool_source import PoolSource
from dilatant.data.workers.ray_source import RaySource


class PersistentPool:
    """This machine's worker pool, if this process owns it, kept over generations of ranks with the same data; `close`
    ends it."""

    def __init__(self) -> None:
        self._owner: PoolOwner | None = None

    def owner(self, datasets: Mapping[str, Dataset], encoding: Encoding, workers: int, seconds: float) -> PoolOwner:
        """Return the existing pool, with the number of workers that it began with; a new one if there is none left."""
        if self._owner is None or not self._owner.is_open:
            self._owner = PoolOwner(datasets, encoding, workers, seconds)
        return self._owner

    def close(self) -> None:
        if self._owner is not None:
            self._owner.close()


class RankSource:
    """`SampleSource` of a rank. It is the worker pool of its machine, which the lowest rank there owns, or producers on
    a Ray cluster, where rank 0 starts a local one. All ranks make it together.

    comm: None in a process alone. how: the keys about workers. pool: outlives the source; None to end the pool with it.
    Raises UserError for a cluster that cannot be used.
    """

    def __init__(
        self,
        comm: Comm | None,
        datasets: Mapping[str, Dataset],
        encoding: Encoding,
        how: DataConfig,
        pool: PersistentPool | None = None,
    ) -> None:
        self._close_later = ExitStack()
        rank, here = (0, (0,)) if comm is None else (comm.rank, comm.ranks_here)
        report, memory = partial(_report, rank), how.memory << 20
        source: SampleSource
        if how.preprocess == "ray" and datasets:
            most = self._connect(comm, how)
            source = RaySource(datasets, encoding, memory, most, how.decode_seconds, report)
        else:
            workers = workers_of_machine(how.workers, len(here))
            address = ""
            if workers and datasets and rank == here[0]:
                if pool is None:
                    pool = self._close_later.enter_context(closing(PersistentPool()))
                address = pool.owner(datasets, encoding, workers, how.decode_seconds).address
            if comm is not None and how.workers != 0:  # ranks may count free cores differently
                address = comm.broadcast_on_machine(address)
            source = PoolSource(address, memory, report) if address else InlineSource(datasets, encoding)
        self._close_later.callback(source.close)
        self.ask, self.take, self.forget = source.ask, source.take, source.forget

    def _connect(self, comm: Comm | None, how: DataConfig) -> int:
        """Connect this rank to the cluster, and return the number of its producers at the most."""
        rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        # All ranks raise rank 0's error; ranks of other machines find no cluster on this one's loopback.
        opened: list[str] = ["", "", ""]
        if rank == 0:
            try:
                cpus = max(workers_of_machine(how.workers, ranks), ranks)
                store_bytes = 2 * (how.memory << 20) * ranks
                connection = Connection(cluster_address(how.ray_address), cpus=cpus, store_bytes=store_bytes)
                opened = [connection.address, connection.token, ""]
            except UserError as error:
                opened[2] = str(error)
        address, token, problem = opened if comm is None else all_gather_object(comm, opened)[0]
        if problem:
            raise UserError(problem)
        if rank:
            connection = Connection(address, token)
        self._close_later.callback(connection.close)
        return max(1, min(how.workers or connection.cpus, connection.cpus) // ranks)

    def close(self) -> None:
        """Leave the pool or the cluster, and end what this source started."""
        self._close_later.close()


def warm_up_next_owner(comm: Comm, how: DataConfig) -> None:
    """Start the server that forks workers, which takes seconds, if this rank is next to own its machine's pool."""
    if how.preprocess != "ray" and how.workers != 0 and comm.ranks_here[1:2] == (comm.rank,):
        warm_up()


def _report(rank: int, waiting: Waiting) -> None:
    """Report a wait to the terminal of this rank: the cause may be the disk of its machine alone."""
    print(f"rank {rank} waits {waiting}", file=sys.stderr, flush=True)
