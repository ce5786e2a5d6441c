"""Processes that do a job for every task of a stream, results in task order.

They come from the fork server, which holds what they import.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from dilatant.comm import fork_server
from dilatant.config.environment import compute_in_one_thread
from dilatant.config.errors import UserError

T = TypeVar("T")
R = TypeVar("R")

PRELOAD = ("dilatant.data.encode", "dilatant.data.reader", "transformers.utils.chat_template_utils")
"""Imported once by the server process, so that a worker is there in a moment. None of them starts a thread."""

TASKS_IN_HAND = 3
"""Tasks a worker holds at once: one at work and the next ones waiting, so that it never waits for us."""


class WorkerError(RuntimeError):
    """A worker process died, or failed in a way that is no mistake in the data."""


def warm_up() -> None:
    """Start the server that workers come from (see `fork_server.warm_up`)."""
    fork_server.warm_up(PRELOAD)


class WorkerPool(Generic[T, R]):
    """`workers` processes, each with its own copy of `job`; with 0 the job runs in the caller.

    job: picklable; called with one task. A UserError it raises is an ordinary result (see `map`).
    """

    def __init__(self, job: Callable[[T], R], workers: int) -> None:
        self._job = job
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        util.Finalize(self, _end, (self._processes, self._connections), exitpriority=0)
        if workers:
            context = multiprocessing.get_context("forkserver")
            warm_up()
            payload = pickle.dumps(job)
            for number in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(theirs, payload), name=f"dilatant-data-{number}", daemon=True
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)

    def map(self, tasks: Iterable[T], ahead: int) -> Iterator[R | UserError]:
        """The result of every task, in order. A task whose job raised a UserError gives that error as its result.

        ahead: most tasks started and not yet taken from this iterator. Raises WorkerError at once when a worker dies
        or a job fails otherwise. One map at a time.
        """
        if not self._processes:
            yield from self._map_here(tasks)
            return
        source = enumerate(tasks)
        done: dict[int, Any] = {}
        in_hand = [0] * len(self._processes)
        started, taken, more = 0, 0, True
        while True:
            while more and started - taken < max(ahead, 1) and min(in_hand) < TASKS_IN_HAND:
                try:
                    number, task = next(source)
                except StopIteration:
                    more = False
                    break
                worker = in_hand.index(min(in_hand))
                self._send(worker, (number, task))
                in_hand[worker] += 1
                started += 1
            if taken in done:
                yield self._opened(done.pop(taken))
                taken += 1
                continue
            if not more and taken == started:
                return
            for worker, (number, *result) in self._receive():
                in_hand[worker] -= 1
                done[number] = result

    def _map_here(self, tasks: Iterable[T]) -> Iterator[R | UserError]:
        for task in tasks:
            try:
                result: R | UserError = self._job(task)
            except UserError as error:
                result = error
            yield result

    def _send(self, worker: int, message: Any) -> None:
        try:
            self._connections[worker].send(message)
        except OSError:
            raise self._death(worker) from None

    def _receive(self) -> Iterator[tuple[int, Any]]:
        """Results that have arrived; waits for the first."""
        for ready in wait(self._connections):
            worker = self._connections.index(ready)  # type: ignore[arg-type]
            try:
                yield worker, self._connections[worker].recv()
            except (EOFError, OSError):
                raise self._death(worker) from None

    def _death(self, worker: int) -> WorkerError:
        process = self._processes[worker]
        process.join(timeout=5)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += ", probably because memory ran out; use fewer 'data.workers'"
        else:
            how = f"ended with exit code {code}"
        return WorkerError(f"data worker {worker} (process {process.pid}) {how}")

    @staticmethod
    def _opened(result: Any) -> Any:
        kind, value = result
        if kind == "value":
            return value
        if kind == "mistake":
            return value
        raise WorkerError(f"a data worker failed:\n{value}")

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        _end(self._processes, self._connections)


def _end(processes: list[Any], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for connection in connections:
        connection.close()
    processes.clear()
    connections.clear()


def _work(connection: Connection, payload: bytes) -> None:
    """The life of a worker: do tasks until the other end closes."""
    for asked in (signal.SIGINT, signal.SIGTERM):  # the caller decides what they mean, and ends us
        signal.signal(asked, signal.SIG_IGN)
    compute_in_one_thread()
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        # Taken off the pipe at once: a caller must never block on us while we block on it.
        try:
            while True:
                waiting.put(connection.recv())
        except (EOFError, OSError):
            waiting.put(None)

    job: Any = None
    threading.Thread(target=listen, daemon=True).start()
    while (message := waiting.get()) is not None:
        number, task = message
        try:
            job = job if job is not None else pickle.loads(payload)
            reply = (number, "value", job(task))
        except UserError as error:
            reply = (number, "mistake", error)
        except BaseException:
            reply = (number, "failure", traceback.format_exc())
        try:
            connection.send(reply)
        except OSError:
            return
