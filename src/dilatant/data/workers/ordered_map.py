"""Ordered parallel map: worker processes run a job on a stream of tasks, and results come in task order.

Workers are forked from the fork server, which has already imported their modules.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from dilatant.comm import fork_server
from dilatant.config.environment import compute_in_one_thread
from dilatant.config.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

PRELOAD = ("dilatant.data.workers.pool_worker", "dilatant.data.readers.reader", "dilatant.data.text.template_engine")
"""Modules that the fork server imports once, so that workers start quickly. None of them starts a thread."""

TASKS_PER_WORKER = 3
"""Tasks that a worker holds at once: one running and the next ones queued, so that it never waits for its owner."""


TASK_SECONDS = 300.0
"""Time limit of one task. A worker that exceeds it is suspended, or waits for a file that never arrives."""
GRACE_SECONDS = 1.0
"""Extra time for an overdue worker's answer, in case this process was the suspended one."""
MOST_WORKERS_PER_RANK = 8


class WorkerError(RuntimeError):
    """A worker process died, or failed for a reason other than bad data."""


class UnreadableFileError(WorkerError, UserError):
    """A file could not be read from a disk or file server (or its cache). The user can repair this, so no stack trace
    is shown; the sample is not at fault and must not be skipped."""


def warm_up() -> None:
    """Start the fork server that workers are forked from (see `fork_server.warm_up`)."""
    fork_server.warm_up(PRELOAD)


def start_worker(number: int, main: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """Start a worker process, and return it with this end of the pipe to it. main: called with the other end, `args`,
    and the folder for `remove_orphaned_folder`. Raises OSError or EOFError if the fork server has just exited."""
    warm_up()  # preloads the modules again if the fork server has exited meanwhile
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    given = theirs, *args, fork_server.multiprocessing_folder()
    process = context.Process(target=main, args=given, name=f"dilatant-data-{number}", daemon=True)
    process.start()
    theirs.close()
    return process, ours


def workers_of_machine(asked: int | None, ranks: int = 1) -> int:
    """Return the number of data workers for a machine with `ranks` ranks. It is `asked` if that is not None, else the
    cores that the ranks leave free, at least one and at most eight per rank."""
    if asked is not None:
        return asked
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, min(cores - ranks, MOST_WORKERS_PER_RANK * ranks))


@dataclass(eq=False)
class _RunningWorker(Generic[T]):
    """A worker process. tasks: those that it holds; since: `time.monotonic` when it began the first of them."""

    shown: str
    process: Any
    connection: Connection
    tasks: deque[T] = field(default_factory=deque)
    since: float = 0.0

    def death(self) -> WorkerError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        if code == fork_server.NO_GUARD_EXIT:
            return UnreadableFileError(fork_server.NO_GUARD)
        return WorkerError(f"{self.shown} {how_ended(code)}")


class WorkerPool(Generic[T, R]):
    """`workers` processes, each with its own copy of `job`.

    job: picklable; called with one task. named: returns a task's name for messages. task_seconds: time limit of a task.
    """

    def __init__(
        self,
        job: Callable[[T], R],
        workers: int,
        *,
        named: Callable[[T], str] = repr,
        task_seconds: float = TASK_SECONDS,
    ) -> None:
        self._named = named
        self._task_seconds = task_seconds
        self._workers: list[_RunningWorker[T]] = []
        self.close = util.Finalize(self, _end, (self._workers,), exitpriority=0)
        """Kill the worker processes. Idempotent."""
        payload = pickle.dumps(job)
        for number in range(workers):
            process, connection = start_worker(number, _work, payload)
            shown = f"data worker {number} (process {process.pid})"
            self._workers.append(_RunningWorker(shown, process, connection))

    def map(self, tasks: Iterable[T], ahead: int) -> Iterator[R]:
        """Yield the result of every task, in order. Raises the UserError of a job in its place.

        ahead: most tasks started but not yet yielded. Raises WorkerError as soon as a worker dies, a job fails with
        another error, or a task exceeds its time limit. One map at a time.
        """
        source = enumerate(tasks)
        done: dict[int, Any] = {}
        started, taken, more = 0, 0, True
        while True:
            while more and started - taken < max(ahead, 1):
                worker = min(self._workers, key=lambda each: len(each.tasks))
                if len(worker.tasks) >= TASKS_PER_WORKER:
                    break
                if (task := next(source, None)) is None:
                    more = False
                    break
                self._send(worker, *task)
                started += 1
            if taken in done:
                kind, value = done.pop(taken)
                if kind == "mistake":
                    raise value
                if kind == "failure":
                    raise WorkerError(f"a data worker failed:\n{value}")
                yield value
                taken += 1
                continue
            if not more and taken == started:
                return
            for number, *result in self._receive():
                done[number] = result

    def _send(self, worker: _RunningWorker[T], number: int, task: T) -> None:
        if not worker.tasks:
            worker.since = time.monotonic()
        worker.tasks.append(task)
        try:
            worker.connection.send((number, task))
        except OSError:
            raise worker.death() from None

    def _receive(self) -> Iterator[Any]:
        """Yield the results that have arrived; wait for the first one."""
        oldest = min((each for each in self._workers if each.tasks), key=lambda each: each.since)
        left = oldest.since + self._task_seconds - time.monotonic()
        if left <= 0 and not oldest.connection.poll(GRACE_SECONDS):
            raise WorkerError(
                f"{oldest.shown} has been at {self._named(oldest.tasks[0])} for "
                f"{self._task_seconds:g} s: it is stopped, or a file of that sample cannot be read to its end"
            )
        ready = wait([each.connection for each in self._workers], max(left, 0))
        for worker in (each for each in self._workers if each.connection in ready):
            try:
                result = worker.connection.recv()
            except (EOFError, OSError):
                raise worker.death() from None
            worker.tasks.popleft()
            worker.since = time.monotonic()
            yield result


def how_ended(code: int | None) -> str:
    """Describe the exit code of a data worker."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    hint = ", probably because memory ran out (use fewer 'data.workers')" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _end(workers: list[_RunningWorker[Any]]) -> None:
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(timeout=5)  # it may wait for a dead file server, and exits when the server answers
        worker.connection.close()
    workers.clear()


def begin_work() -> None:
    """Set this process up as a data worker. It ignores SIGINT and SIGTERM (its owner ends it), computes in one thread,
    and silences libraries' warnings about files, which name neither the sample nor the remedy."""
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)
    compute_in_one_thread()
    keep_freed_memory()
    warnings.simplefilter("ignore")
    # C libraries (libmpg123) write to descriptor 2; Python's own stderr keeps its destination.
    sys.stderr = open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def unpickle_job(payload: bytes) -> Any:
    """Unpickle a worker's job. Raises WorkerError, in one line, for a module that only the owner can import."""
    try:
        return pickle.loads(payload)
    except (AttributeError, ImportError) as error:
        raise WorkerError(
            f"it cannot import what samples are read by: {error}; put what is defined in a notebook, at a prompt or on "
            "standard input into a .py file, or set workers to 0"
        ) from None


def _work(connection: Connection, payload: bytes, shared: str | None) -> None:
    """Main function of a worker: run tasks until the other end closes. shared: see `remove_orphaned_folder`."""
    begin_work()
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        # Read the pipe at once: the owner must never block on sending while this worker blocks on sending to the owner.
        # When the owner is gone this process exits, even if the job is waiting for a file.
        try:
            while True:
                waiting.put(connection.recv())
        except BaseException:
            fork_server.remove_orphaned_folder(shared)
            os._exit(0)

    job: Any = None
    threading.Thread(target=listen, daemon=True).start()
    while True:
        number, task = waiting.get()
        try:
            job = job if job is not None else unpickle_job(payload)
            reply = (number, "value", job(task))
        except UserError as error:
            reply = (number, "mistake", error)
        except WorkerError as error:
            reply = (number, "failure", str(error))
        except BaseException:
            reply = (number, "failure", traceback.format_exc())
        try:
            connection.send(reply)
        except OSError:
            return


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20
"""The maximum that glibc accepts."""
_KEPT = 512 << 20


def keep_freed_memory() -> None:
    """Let glibc keep up to 512 MiB of freed memory in this process for the next image.

    By default glibc returns megabytes to the system and faults them in again page by page, a third of the time of
    decoding an image of 1,024 pixels. Other C libraries are left unchanged.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
