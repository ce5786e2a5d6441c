"""Small values reach every rank, in as many hops as the radix asks for."""

from __future__ import annotations

import torch

from dilatant.comm.comm import Comm
from dilatant.comm.gather import AsyncAllGather, all_gather_object
from harness.worker_pool import Worker, WorkerPool


def _gather(worker: Worker) -> tuple[list[list], list]:
    comm = Comm(worker.store, worker.rank, worker.size)
    own = torch.tensor([[worker.rank, 10 * worker.rank]])
    begun = [AsyncAllGather(comm, own, "a test", radix) for radix in (2, 3, 8)]
    rows = [gathering.wait().tolist() for gathering in begun]
    values = all_gather_object(comm, {"rank": worker.rank, "text": "é" * worker.rank})
    comm.close()
    return rows, values


def test_every_rank_gets_the_values_of_all_by_rank(workers: WorkerPool) -> None:
    for size in (1, 2, 5, 8):
        expected = [[[rank, 10 * rank]] for rank in range(size)]
        values = [{"rank": rank, "text": "é" * rank} for rank in range(size)]
        for rows, exchanged in workers.run(_gather, size):
            assert rows == [expected] * 3
            assert exchanged == values
