"""The pool that distributed tests stand on."""

from __future__ import annotations

import os
import signal
import time

import pytest

from harness.patience import HANG_SECONDS
from harness.worker_pool import Worker, WorkerPool, WorkersFailed


def _sum_over_ranks(worker: Worker, offset: int) -> int:
    worker.store.set(str(worker.rank), str(worker.rank + offset))
    return sum(int(worker.store.get(str(rank))) for rank in range(worker.size))


def _fail_on_one(worker: Worker) -> int:
    if worker.rank == 1:
        raise ValueError("broken on purpose")
    return worker.rank


def _die_on_one(worker: Worker) -> int:
    if worker.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return worker.rank


def _hang_on_one(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(1000)


def test_a_function_runs_once_on_every_rank_with_a_store(workers: WorkerPool) -> None:
    assert workers.run(_sum_over_ranks, 8, 1) == [36] * 8
    assert workers.run(_sum_over_ranks, 3, 0) == [3] * 3


@pytest.mark.parametrize(
    ("function", "message", "seconds"),
    [
        (_fail_on_one, "rank 1 of 2:.*ValueError: broken on purpose", HANG_SECONDS),
        (_die_on_one, r"rank 0 of 2:.*exit code -9", HANG_SECONDS),
        (_hang_on_one, "rank 1 of 2: did not end", 1.0),
    ],
)
def test_a_failure_names_its_rank_and_the_pool_goes_on(workers: WorkerPool, function, message, seconds) -> None:
    with pytest.raises(WorkersFailed, match=f"(?s){message}"):
        workers.run(function, 2, timeout_seconds=seconds)
    assert workers.run(_sum_over_ranks, 2, 0) == [1, 1]
