"""Ranks may communicate, fail and communicate again in the same processes, and never meet what was before."""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta

import pytest
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.launch import Worker as LaunchedWorker
from dilatant.comm.launch import launch_local, local_worker
from dilatant.comm.rendezvous import announce_failure
from harness.patience import HANG_SECONDS
from harness.worker_pool import Worker, WorkerPool


def _sums(comm: Comm, worker: Worker) -> list[float]:
    total, pair = torch.tensor([worker.rank + 1.0]), torch.ones(3)
    comm.world.sum_(total).wait()
    if worker.rank < 2:
        comm.group("pair", (0, 1)).sum_(pair).wait()
    return [total.item(), pair.sum().item()]


def _fail(comm: Comm, worker: Worker, how: str) -> None:
    if worker.rank == 1 and how == "early":
        raise ValueError("before it did anything")
    if worker.rank == 1 and how == "beside a group":
        time.sleep(0.2)
        raise ValueError("while others make a group")
    if how == "beside a group":
        comm.group("all", range(worker.size))
    comm.world.receive(torch.zeros(1), source=1).wait()


def _again_and_again(worker: Worker, hows: list[str]) -> list[list[float]]:
    results = []
    for how in hows:
        comm = None
        try:
            comm = Comm(worker.store, worker.rank, worker.size)
            if how:
                _fail(comm, worker, how)
            results.append(_sums(comm, worker))
        except ValueError as error:
            assert comm is not None
            comm.abort(f"rank 1 failed: {error}")
        except CommAborted as error:  # while it is made, too
            if "rank 1 failed" not in str(error):
                raise
        if comm is not None:
            comm.close()
    return results


@pytest.mark.parametrize("hows", [["", "", ""], ["early", "", "beside a group", ""]])
def test_one_generation_can_be_joined_again_also_after_a_failure(workers: WorkerPool, hows: list[str]) -> None:
    good = hows.count("")
    for rank, results in enumerate(workers.run(_again_and_again, 3, hows)):
        assert results == [[6.0, 6.0 if rank < 2 else 3.0]] * good


def _one_comes_too_late_the_first_time(worker: Worker) -> list[float]:
    if worker.rank > 0:
        worker.store.set(f"here/{worker.rank}", b"")
        worker.store.wait([f"here/{rank}" for rank in range(1, worker.size)])
        with pytest.raises((CommTimeout, CommAborted), match="rank 0 has not begun to communicate"):
            Comm(worker.store, worker.rank, worker.size, timeout_seconds=1)
        worker.store.set(f"over/{worker.rank}", b"")
    worker.store.wait([f"over/{rank}" for rank in range(1, worker.size)])
    comm = Comm(worker.store, worker.rank, worker.size)
    sums = _sums(comm, worker)
    comm.close()
    return sums


def test_an_attempt_that_not_all_joined_leaves_nothing_behind(workers: WorkerPool) -> None:
    assert [sums[0] for sums in workers.run(_one_comes_too_late_the_first_time, 3)] == [6.0] * 3


def _entry_of_a_lost_attempt(worker: Worker) -> list[float]:
    if worker.rank == 1:  # it joined, and was aborted or killed before all were there
        worker.store.set("generation/0/join/1", json.dumps(["inbox/lost", "machine"]))
        worker.store.pop("offers/inbox/lost", timedelta(seconds=HANG_SECONDS))
    else:
        worker.store.wait(["generation/0/join/1"])
    comm = Comm(worker.store, worker.rank, worker.size)
    sums = _sums(comm, worker)
    comm.close()
    return sums


def test_ranks_begin_with_nobody_who_joined_and_was_lost(workers: WorkerPool) -> None:
    assert [sums[0] for sums in workers.run(_entry_of_a_lost_attempt, 3)] == [6.0] * 3


def _beside_the_next(worker: Worker) -> list[list[float]]:
    first = Comm(worker.store, worker.rank, worker.size)
    second = Comm(worker.store, worker.rank, worker.size)
    if worker.rank == 2:
        first.abort("only the first")
    results = [_sums(second, worker)]
    with pytest.raises(CommAborted, match="only the first"):
        first.world.receive(torch.zeros(1), source=(worker.rank + 1) % 3).wait()
    first.close()
    results.append(_sums(second, worker))
    second.close()
    with pytest.raises(CommAborted, match="is closed"):
        second.world.sum_(torch.ones(1)).wait()
    return results


def test_the_end_of_one_attempt_does_not_touch_another_one(workers: WorkerPool) -> None:
    workers.run(_beside_the_next, 3)


def test_a_single_rank_opens_no_socket_and_starts_no_thread() -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = resources()
    worker = local_worker()
    comm = Comm(worker.store, worker.rank, worker.size)
    output = torch.zeros(3)
    comm.world.sum_(torch.ones(3)).wait()
    comm.world.all_gather(output, torch.arange(3.0)).wait()
    comm.world.barrier()
    assert output.tolist() == [0, 1, 2]
    assert resources() == before
    comm.abort("enough")
    with pytest.raises(CommAborted, match="enough"):
        comm.world.barrier()
    comm.close()


def _twice(worker: LaunchedWorker) -> list[float]:
    results = []
    for _ in range(2):
        comm = Comm(worker.store, worker.rank, worker.size)
        total = torch.ones(1)
        comm.world.sum_(total).wait()
        results.append(total.item())
        comm.close()
    return results


def test_one_launch_communicates_twice() -> None:
    assert launch_local(_twice, 2) == [[2.0, 2.0]] * 2


def _after_an_announced_failure(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size)
    comm.world.barrier()
    comm.close()
    worker.store.add("closed", 1)
    if worker.rank == 0:
        while worker.store.add("closed", 0) < 2:
            time.sleep(0.01)
        announce_failure(worker.store, "rank 2 was killed")
        worker.store.set("announced", b"")
    worker.store.wait(["announced"])
    with pytest.raises(CommAborted, match="rank 2 was killed"):
        Comm(worker.store, worker.rank, worker.size)
    again = Comm(worker.store, worker.rank, worker.size, generation=1)
    sums = _sums(again, worker)
    again.close()
    return str(sums)


def test_a_failed_generation_is_closed_and_the_next_one_opens(workers: WorkerPool) -> None:
    assert workers.run(_after_an_announced_failure, 2) == ["[3.0, 6.0]"] * 2
