"""The host notices that a device waits in vain, whatever the device does, and nothing else."""

from __future__ import annotations

import re
import threading
import time

import pytest

from dilatant.comm import backends
from dilatant.comm.comm import Comm
from dilatant.comm.deadlines import ProgressDeadline
from dilatant.comm.errors import CommAborted, CommTimeout
from harness.worker_pool import Worker, WorkerPool, meet


class _Work:
    """Stands in for work on a stream: waiting for it returns at once, and it completes when told."""

    def __init__(self, completed: bool = False) -> None:
        self.completed = completed

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.completed


def test_a_deadline_counts_from_progress_and_names_the_oldest() -> None:
    progress = ProgressDeadline()
    assert progress.check(0.0) is None
    works = [_Work() for _ in range(3)]
    for number, work in enumerate(works):
        progress.add(f"work {number}", work.is_completed, now=10.0 + number)
    assert (progress.check(15.0).what, progress.check(15.0).seconds) == ("work 0", 5.0)
    works[1].completed = True
    assert (progress.check(20.0).what, progress.check(20.0).seconds) == ("work 0", 0.0)
    works[0].completed = True
    assert progress.check(25.0).what == "work 2"
    assert progress.check(29.0).seconds == 4.0
    works[2].completed = True
    assert progress.check(30.0) is None
    # A pause between steps is no stall.
    progress.add("work 3", _Work().is_completed, now=1000.0)
    assert progress.check(1001.0).seconds == 1.0
    progress.clear()
    assert progress.check(2000.0) is None


def test_work_that_failed_is_told_at_once() -> None:
    def fails() -> bool:
        raise RuntimeError("NCCL error: remote process exited")

    progress = ProgressDeadline()
    progress.add("rows of sample 7", fails, now=0.0)
    stalled = progress.check(0.1)
    assert stalled.what == "rows of sample 7"
    assert "remote process exited" in stalled.error


class _Device:
    """Stands in for a GPU that computes behind the host: `synchronize` blocks until its work completes or is ended."""

    def __init__(self, work: _Work) -> None:
        self.work = work
        self.aborted = threading.Event()

    def synchronize(self) -> None:
        while not self.work.completed and not self.aborted.wait(0.01):
            pass


def _host_waits_for_its_device(worker: Worker, how: str) -> str:
    meet(worker)  # the timeout below judges no start of a process
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=3)
    comm.world.barrier()
    device = _Device(_Work())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilatant.comm.comm.abort_all", lambda _: device.aborted.set())
        if worker.rank == 1:
            comm.watch_device("rows of sample 7 from rank 0", device.work.is_completed)
            device.synchronize()
        elif how == "busy":
            while comm.aborted is None:
                time.sleep(0.01)
        else:
            comm.watch_device("the gradients of layer 3", device.work.is_completed)
            device.synchronize()
    with pytest.raises((CommAborted, CommTimeout)) as error:
        comm.world.barrier()
    comm.close()
    assert "dilatant-deadlines" not in [thread.name for thread in threading.enumerate()]
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("busy", "rank 0 is busy in _host_waits"), ("also waits", r"rank [01] waits for .* on its GPU since")],
)
def test_a_host_blocked_on_a_gpu_is_freed_and_names_the_cause(
    workers: WorkerPool, how: str, expected: str
) -> None:
    for reason in workers.run(_host_waits_for_its_device, 2, how):
        assert re.match(rf"rank [01] waited over 3 s for .*; {expected}", reason), reason


def test_all_nccl_communicators_are_aborted_in_one_group() -> None:
    calls: list[str] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name

        def _group_start(self) -> None:
            calls.append("start")

        def _group_end(self) -> None:
            calls.append("end")

        def abort(self) -> None:
            calls.append(self.name)
            raise RuntimeError("one that fails does not keep the others")

    handles = [backends.Backend(Handle(name), None, 0, 2, is_nccl=True) for name in "ab"]
    backends.abort_all(handles)
    assert calls == ["start", "a", "b", "end"]


def _opens_for_ever(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=60)
    comm.world.barrier()
    opened = threading.Event()

    def never(*_: object) -> None:
        opened.set()
        time.sleep(100)

    if worker.rank == 0:
        threading.Thread(target=lambda: (opened.wait(), comm.abort("rank 1 died")), daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dilatant.comm.comm.open_gloo", never)
        with pytest.raises(CommAborted, match="rank 1 died"):
            comm.group("pair", (0, 1))
    comm.close()
    return "freed"


def test_an_abort_frees_a_rank_opening_a_communicator(workers: WorkerPool) -> None:
    assert workers.run(_opens_for_ever, 2) == ["freed"] * 2
