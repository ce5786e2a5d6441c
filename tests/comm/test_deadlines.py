"""The host notices that a device waits in vain, whatever else the device does, and raises no false alarm."""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import threading
import time
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import ErrorType

from dilatant.comm import backends
from dilatant.comm.comm import ABORTED, Comm
from dilatant.comm.deadlines import DeadlineThread, ProgressDeadline, Stalled
from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.group import Group
from harness.patience import wait_until
from harness.worker_pool import Worker, WorkerPool, meet


class _Work:
    """Stand-in for work on a stream: `wait` returns at once, and the test decides when the work completes."""

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
    """Stand-in for an asynchronous GPU: `synchronize` blocks until its work completes or is aborted."""

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
def test_a_host_blocked_on_a_gpu_is_freed_and_names_the_cause(workers: WorkerPool, how: str, expected: str) -> None:
    for reason in workers.run(_host_waits_for_its_device, 2, how):
        assert re.match(rf"rank [01] waited over 3 s for .*; {expected}", reason), reason


def _aborts_before_another_rank_asks(worker: Worker) -> tuple[str, list[int]]:
    meet(worker)
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=1)
    store = worker.store.clone()
    comm.world.barrier()
    found: tuple[str, list[int]] = "", []
    if worker.rank == 0:
        comm.abort("rank 1 is late", notify_others=False)
        store.set("aborted", b"")
        store.wait(["answered"])  # busy with what follows an abort
    else:
        store.wait(["aborted"])
        found = comm._describe_others()
        store.set("answered", b"")
    store.close()
    comm.close()
    return found


def test_a_rank_that_has_aborted_is_not_blamed_for_what_it_does_then(workers: WorkerPool) -> None:
    _, (text, culprits) = workers.run(_aborts_before_another_rank_asks, 2)
    assert (text, culprits) == (f"rank 0 {ABORTED}", [])


class _Handle:
    """Stand-in for an NCCL communicator."""

    def __init__(self, abort: Callable[[], object] = lambda: None, error: ErrorType = ErrorType.SUCCESS) -> None:
        self.abort = abort
        self.error = error

    def get_error(self) -> ErrorType:
        return self.error


def _nccl(*handles: _Handle) -> list[backends.Backend]:
    return [backends.Backend(handle, None, 0, 2, is_nccl=True) for handle in handles]


def test_nccl_communicators_are_aborted_at_once() -> None:
    """The abort of the first communicator returns only when the others are being aborted, and one abort fails."""
    together = threading.Barrier(3, timeout=5.0)

    def fails() -> None:
        together.wait()
        raise RuntimeError("one that fails does not keep the others")

    backends.abort_all(_nccl(_Handle(together.wait), _Handle(fails), _Handle(together.wait)))
    assert not together.broken


def test_aborts_that_hang_take_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ABORT_SECONDS", 0.2)
    end = threading.Event()
    began = time.monotonic()
    backends.abort_all(_nccl(*(_Handle(end.wait) for _ in range(20))))
    end.set()
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("completed", [False, True])
def test_work_completed_with_an_error_is_no_progress(completed: bool) -> None:
    """NCCL also reports a failed operation as completed."""
    stalls: list[Stalled] = []
    work, handle = _Work(), _Handle()
    (backend,) = _nccl(handle)
    deadline = DeadlineThread(2.0, stalls.append, backend.error)
    deadline.add("rows of sample 7", work.is_completed)
    handle.error = ErrorType.COMM_ERROR
    work.completed = completed
    wait_until(lambda: bool(stalls))
    deadline.close()
    assert (stalls[0].what, stalls[0].error) == ("rows of sample 7", "NCCL reports COMM_ERROR")


def _errors_of_nccl(worker: Worker) -> str:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=60)
    comm.world.barrier()
    handle = _Handle()
    comm._groups["pair"] = Group(comm, "pair", (0, 1), worker.rank, *_nccl(handle))
    if worker.rank == 1:
        comm.watch_device("rows of sample 7 from rank 0", _Work().is_completed)
        handle.error = ErrorType.REMOTE_ERROR
    wait_until(lambda: comm.aborted is not None)
    del comm._groups["pair"]
    comm.close()
    return str(comm.aborted)


def test_an_error_of_any_communicator_ends_a_wait_for_another(workers: WorkerPool) -> None:
    for reason in workers.run(_errors_of_nccl, 2):
        assert "rank 1 lost its peer in rows of sample 7 from rank 0" in reason
        assert "NCCL reports REMOTE_ERROR in pair" in reason


@pytest.mark.parametrize("hangs", ["work", "communicator"])
def test_polls_that_do_not_return_are_noticed_and_hold_nobody(hangs: str) -> None:
    end = threading.Event()
    stalls: list[Stalled] = []

    def never() -> bool:
        end.wait()
        return False

    deadline = DeadlineThread(0.4, stalls.append, (lambda: str(never())) if hangs == "communicator" else str)
    deadline.add("rows of sample 7", never if hangs == "work" else _Work().is_completed)
    time.sleep(0.1)
    deadline.add("rows of sample 8", _Work().is_completed)  # the main thread, which must not hang, too
    assert deadline.oldest().what == "rows of sample 7"
    wait_until(lambda: bool(stalls))
    end.set()
    deadline.close()
    assert [stalled.what for stalled in stalls] == ["its GPU's driver to answer"]


def _blocks_with_the_lock_of_python() -> None:
    """Work whose status query never returns and holds the interpreter lock."""
    deadline = DeadlineThread(0.3, lambda _: None, exits=True)
    deadline.add("rows", lambda: bool(ctypes.PyDLL(None).sleep(100)))
    time.sleep(100)


def test_a_process_in_which_no_python_runs_ends_itself() -> None:
    process = multiprocessing.get_context("fork").Process(target=_blocks_with_the_lock_of_python)
    process.start()
    process.join(20.0)
    alive = process.is_alive()
    process.kill()
    assert not alive
    assert process.exitcode == 1


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
