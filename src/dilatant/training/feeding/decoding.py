"""Sources of a rank's decoded samples: a worker pool on every machine, a Ray cluster, or the rank itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from dilatant.comm.comm import Comm
from dilatant.comm.gather import all_gather_object
from dilatant.config import DataConfig, UserError
from dilatant.data.order.blend import Blend
from dilatant.data.text.encoding import Encoding
from dilatant.data.workers.ordered_map import warm_up, workers_of_machine
from dilatant.data.workers.pool import InlineSource, SampleSource, Waiting
from dilatant.data.workers.pool_owner import PoolOwner
from dilatant.data.workers.pool_source import join
from dilatant.data.workers.ray_cluster import Connection, cluster_address
from dilatant.data.workers.ray_source import RaySource


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding settings. workers: processes on every machine (None: as many as its cores leave room for; 0: the rank
    itself). seconds: limit for one sample. memory: bytes of decoded samples that a rank holds ahead. cluster: Ray
    cluster that decodes, see `ray_cluster.Connection`; workers are then those of all ranks together."""

    workers: int | None = None
    seconds: float = 60.0
    memory: int = 512 << 20
    cluster: str | None = None


def decoding_of(config: DataConfig) -> Decoding:
    """Return the decoding settings of a config."""
    cluster = cluster_address(config.ray_address) if config.preprocess == "ray" else None
    return Decoding(config.workers, config.decode_seconds, config.memory << 20, cluster)


class ClusterSource:
    """`SampleSource` of producers on a Ray cluster, made by all ranks together; rank 0 starts a local cluster."""

    def __init__(
        self, comm: Comm | None, datasets: Mapping[str, Blend], encoding: Encoding, how: Decoding
    ) -> None:
        assert how.cluster is not None
        rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
        # All ranks raise rank 0's error; ranks of other machines find no cluster on this one's loopback.
        opened: list[str] = ["", "", ""]
        if rank == 0:
            try:
                cpus = max(workers_of_machine(how.workers, ranks), ranks)
                self._connection = Connection(how.cluster, cpus=cpus, store_bytes=2 * how.memory * ranks)
                opened = [self._connection.cluster.address, self._connection.cluster.token, ""]
            except UserError as error:
                opened[2] = str(error)
        address, token, problem = opened if comm is None else all_gather_object(comm, opened)[0]
        if problem:
            raise UserError(problem)
        if rank:
            self._connection = Connection(address, token)
        most = max(1, min(how.workers or self._connection.cpus, self._connection.cpus) // ranks)
        self._source = RaySource(
            datasets, encoding, how.memory, most, decode_seconds=how.seconds, on_wait=partial(_report, rank)
        )
        self.ask, self.take, self.forget = self._source.ask, self._source.take, self._source.forget

    def close(self) -> None:
        """Leave the cluster; one that was started for the run ends with rank 0."""
        self._source.close()
        self._connection.close()


class PersistentPool:
    """This machine's worker pool, if this process owns it, kept over generations of ranks with the same data; `close`
    ends it."""

    def __init__(self) -> None:
        self._owner: PoolOwner | None = None

    def owner(
        self, datasets: Mapping[str, Blend], encoding: Encoding, workers: int, how: Decoding
    ) -> PoolOwner:
        """Return the existing pool, with the number of workers that it began with; a new one if there is none left."""
        if self._owner is None or not self._owner.is_open:
            self._owner = PoolOwner(datasets, encoding, workers, how.seconds)
        return self._owner

    def close(self) -> None:
        if self._owner is not None:
            self._owner.close()


def open_source(
    comm: Comm | None,
    datasets: Mapping[str, Blend],
    encoding: Encoding,
    how: Decoding,
    pool: PersistentPool | None = None,
) -> SampleSource:
    """Open the source of this rank's samples; called by all ranks together. comm: None in a process alone. pool:
    outlives the source. Raises UserError for a cluster that cannot be used."""
    if how.cluster is not None and datasets:
        return ClusterSource(comm, datasets, encoding, how)
    return MachineSource(comm, datasets, encoding, how, pool)


class MachineSource:
    """`SampleSource` from the worker pool of this rank's machine, which the lowest rank there owns; all ranks make it
    together.

    comm: None in a process alone. pool: None to end the pool with this source.
    """

    def __init__(
        self,
        comm: Comm | None,
        datasets: Mapping[str, Blend],
        encoding: Encoding,
        how: Decoding,
        pool: PersistentPool | None = None,
    ) -> None:
        rank, here = (0, (0,)) if comm is None else (comm.rank, comm.ranks_here)
        workers = workers_of_machine(how.workers, len(here))
        self._pool = PersistentPool() if pool is None else None
        address = ""
        if workers and datasets and rank == here[0]:
            keeper = pool or self._pool
            assert keeper is not None
            address = keeper.owner(datasets, encoding, workers, how).address
        if comm is not None and how.workers != 0:  # ranks may count free cores differently
            address = comm.broadcast_on_machine(address)
        self._source: SampleSource = (
            InlineSource(datasets, encoding)
            if not address
            else join(address, how.memory, on_wait=partial(_report, rank))
        )
        self.ask, self.take, self.forget = self._source.ask, self._source.take, self._source.forget

    def close(self) -> None:
        """Leave the pool, and end it if this source made it."""
        self._source.close()
        if self._pool is not None:
            self._pool.close()


def warm_up_next_owner(comm: Comm, how: Decoding) -> None:
    """Start the server that forks workers, which takes seconds, if this rank is next to own its machine's pool."""
    if how.cluster is None and how.workers != 0 and comm.ranks_here[1:2] == (comm.rank,):
        warm_up()


def _report(rank: int, waiting: Waiting) -> None:
    """Report a wait to the terminal of this rank: the cause may be the disk of its machine alone."""
    print(f"rank {rank} waits {waiting}", file=sys.stderr, flush=True)
