"""Process groups: created by their members alone, aborted from any thread, released with their generation."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time

import pytest
import torch

from dilatant.comm.comm import Comm
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.rendezvous import announce_failure
from harness.worker_pool import Worker, WorkerPool, WorkersFailed, meet


def _groups_of_members(worker: Worker) -> list[float]:
    comm = Comm(worker.store, worker.rank, worker.size)
    sums = []
    # Ranks make unlike numbers of groups, in unlike order: nothing may be counted in common.
    mine = [ranks for ranks in ((0, 1), (1, 2), (0, 2), (2, 3), (0, 1, 2, 3)) if worker.rank in ranks]
    for ranks in sorted(mine, key=lambda ranks: (worker.rank % 2, ranks)) if len(mine) < 2 else mine:
        tensor = torch.tensor([float(worker.rank + 1)])
        comm.group("-".join(map(str, ranks)), ranks).sum_(tensor).wait()
        sums.append(tensor.item())
    alone = torch.ones(2)
    comm.group(f"only{worker.rank}", (worker.rank,)).sum_(alone).wait()
    comm.close()
    return [*sums, alone.sum().item()]


def test_groups_are_made_by_their_members_alone(workers: WorkerPool) -> None:
    assert workers.run(_groups_of_members, 4) == [
        [3.0, 4.0, 10.0, 2.0],
        [3.0, 5.0, 10.0, 2.0],
        [5.0, 4.0, 7.0, 10.0, 2.0],
        [7.0, 10.0, 2.0],
    ]


def _transfers(worker: Worker) -> list[float]:
    comm = Comm(worker.store, worker.rank, worker.size)
    edge = comm.group("edge", (1, 0))
    if worker.rank == 0:
        sent = [edge.send(torch.full((n,), float(n)), to=1, tag=n) for n in (3, 0, 5)]
        for pending in sent:
            pending.wait()
        received = []
    else:
        buffers = [torch.zeros(n) for n in (3, 0, 5)]
        for buffer, pending in [(b, edge.receive(b, source=0, tag=b.numel())) for b in buffers]:
            pending.wait()
            assert torch.equal(buffer, torch.full_like(buffer, buffer.numel()))
        received = [b.sum().item() for b in buffers]
    comm.world.barrier()
    comm.close()
    return received


def test_transfers_arrive_in_order_and_empty_ones_send_nothing(workers: WorkerPool) -> None:
    assert workers.run(_transfers, 2) == [[], [9.0, 0, 25.0]]


def _blocked_until_aborted(worker: Worker, operation: str) -> str:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=1e5)
    group = comm.group("pair", (0, 1, 2))
    comm.world.barrier()
    if worker.rank == 2:
        time.sleep(0.3)
        comm.abort("rank 2 found sample 'x' broken")
    else:
        if operation == "receive":
            pending = group.receive(torch.zeros(4), source=1 - worker.rank)
        else:
            pending = group.sum_(torch.zeros(4))
        with pytest.raises(CommAborted, match="sample 'x' broken"):
            pending.wait()
        with pytest.raises(CommAborted, match="sample 'x' broken"):
            comm.world.barrier()
    comm.close()
    return comm.aborted or ""


@pytest.mark.parametrize("operation", ["receive", "sum"])
def test_an_abort_anywhere_ends_what_others_are_blocked_in(workers: WorkerPool, operation: str) -> None:
    """No rank waits for the timeout, which is longer than any test may take."""
    assert workers.run(_blocked_until_aborted, 3, operation) == ["rank 2 found sample 'x' broken"] * 3


def _beside_a_closed_peer(worker: Worker) -> None:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=100)
    comm.world.barrier()
    if worker.rank == 1:
        worker.store.wait(["closed"])
        threading.Timer(0.3, comm.abort, ("enough", False)).start()
        with pytest.raises(CommAborted, match="enough"):
            comm.world.receive(torch.zeros(1), source=0).wait()
        worker.store.set("over", "")
    comm.close()
    if worker.rank == 2:
        worker.store.set("closed", "")
    worker.store.wait(["over"])


def test_an_abort_ends_a_wait_after_another_rank_closed(workers: WorkerPool) -> None:
    workers.run(_beside_a_closed_peer, 3)


def _waits_for_one_that_left(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=100)
    pair = comm.group("pair", (0, 1)) if worker.rank < 2 else None
    comm.world.barrier()
    reason = ""
    if pair is not None:
        group = comm.world if worker.rank == 1 else pair
        with pytest.raises(CommAborted) as lost:
            group.receive(torch.zeros(1), source=worker.rank + 1, what="rows of sample 7").wait()
        reason = str(lost.value)
    comm.close()
    return reason


def test_a_lost_peer_is_named_to_all_who_wait_for_somebody_else(workers: WorkerPool) -> None:
    first, second, _ = workers.run(_waits_for_one_that_left, 3)
    assert first == second
    assert first.startswith("rank 1 lost its peer in rows of sample 7 from rank 2; rank 2 does not answer")


def _alone_in_making_a_group(worker: Worker) -> None:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=100)
    comm.world.barrier()
    if worker.rank == 0:
        with pytest.raises(CommAborted, match="rank 1 never comes"):
            comm.group("pair", (0, 1))
    else:
        time.sleep(0.3)
        comm.abort("rank 1 never comes")
    comm.close()


def test_an_abort_ends_the_making_of_a_group(workers: WorkerPool) -> None:
    workers.run(_alone_in_making_a_group, 2)


def _killed(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=100)
    comm.world.barrier()
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.rank == 0:  # what a launcher does
        threading.Timer(0.2, announce_failure, (worker.store, "rank 1 was killed")).start()
    with pytest.raises(CommAborted, match="rank 1 was killed"):
        comm.group("survivors", (0, 2)).receive(torch.zeros(1), source=2 - worker.rank).wait()
    comm.close()
    again = Comm(worker.store, worker.rank // 2, 2, generation=1)
    total = torch.ones(1)
    again.world.sum_(total).wait()
    again.close()
    return f"{total.item():g} go on"


def test_survivors_of_a_killed_rank_join_the_next_generation(workers: WorkerPool) -> None:
    with pytest.raises(WorkersFailed) as failed:
        workers.run(_killed, 3)
    assert "rank 1 of 3" in str(failed.value)
    assert "rank 0" not in str(failed.value)
    assert "rank 2" not in str(failed.value)


def _late(worker: Worker) -> str:
    """Wait on ranks 0 and 1 for rank 2, whose process is stopped, and rank 3, which is busy; return the error."""
    meet(worker)  # the timeout below judges no start of a process
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=3)
    comm.world.barrier()
    if worker.rank == 2:
        worker.store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if worker.rank > 1:
        over = threading.Thread(target=worker.store.wait, args=(["over"],))
        over.start()
        while over.is_alive():
            time.sleep(0.01)  # the report must name this function, not the store's
        comm.close()
        return ""
    late = int(worker.store.get("process"))
    with pytest.raises((CommTimeout, CommAborted)) as error:
        comm.world.receive(torch.zeros(1), source=worker.rank + 1, what="rows of sample 7").wait()
    if isinstance(error.value, CommTimeout):
        assert error.value.culprits == (2, 3)
    with contextlib.suppress(ProcessLookupError):
        os.kill(late, signal.SIGCONT)
    worker.store.set("over", "")
    comm.close()
    return str(error.value)


def test_a_comm_timeout_names_its_transfer_and_the_late_ranks(workers: WorkerPool) -> None:
    """A rank that itself waits for another is not named as late."""
    late = r"rank 2 does not answer: [^;]*; rank 3 is busy in _late \(test_comm.py:\d+\)$"
    for reason in workers.run(_late, 4)[:2]:
        assert re.match(rf"rank [01] waited over 3 s for rows of sample 7 from rank [12]; {late}", reason), reason


def _many_generations(worker: Worker) -> tuple[int, int]:
    counts = []
    for generation in range(12):
        comm = Comm(worker.store, worker.rank, worker.size, generation)
        comm.group("a", (0, 1)).barrier()
        comm.world.barrier()
        comm.close()
        del comm
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return max(fds for fds, _ in counts[6:]) - counts[5][0], counts[-1][1] - counts[5][1]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="leaked descriptors are not checked: no /proc")
def test_a_closed_generation_leaves_no_descriptor_and_no_thread(workers: WorkerPool) -> None:
    for descriptors, threads in workers.run(_many_generations, 2):
        assert descriptors <= 2  # connections still closing
        assert threads <= 0
