"""A pool of worker processes that tests run functions of several ranks in.

Workers come from a fork server that has imported torch and transformers once, so one costs milliseconds. They stay
for the whole session. A worker that dies, or hangs after another rank has failed, is replaced.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.fork_server import start_fork_server
from harness.patience import HANG_SECONDS

TOKEN = b"of the tests"
GRACE_SECONDS = 120.0
"""What the other ranks have to end after one has failed; then they are replaced."""


@dataclass(frozen=True)
class Worker:
    """What a function is told about the rank it runs as. `store` is the run's own part of a `Store`."""

    rank: int
    size: int
    store: Any


def meet(worker: Worker) -> None:
    """Wait until all ranks of a run have begun."""
    worker.store.set(f"begun/{worker.rank}", b"")
    worker.store.wait([f"begun/{rank}" for rank in range(worker.size)])


class WorkersFailed(AssertionError):
    """Some ranks failed; the message holds their tracebacks, in the order in which they failed."""


class WorkerPool:
    """Runs `function(worker, *args)` on n ranks at once. `close()` ends the processes."""

    def __init__(self) -> None:
        from dilatant.comm.store.server import StoreServer

        start_fork_server()  # what ranks and tests import is most of their start; the server does it once
        self._context = multiprocessing.get_context("forkserver")
        self._members: list[tuple[Any, Connection]] = []
        self._server = StoreServer("127.0.0.1", 0, TOKEN)
        self._runs = 0

    def run(
        self, function: Callable[..., Any], size: int, *args: Any, timeout_seconds: float = HANG_SECONDS
    ) -> list[Any]:
        """What each rank returned, by rank. The function (module level), arguments and results are pickled.

        Raises WorkersFailed when a rank raises, dies or takes longer than `timeout_seconds`.
        """
        while len(self._members) < size:
            self._members.append(self._start())
        self._runs += 1
        # The path is set before the function is unpickled: its module may be new to the worker.
        payload = pickle.dumps((function, args))
        module = sys.modules[function.__module__]
        home = str(Path(module.__file__ or ".").resolve().parent)
        members = self._members[:size]
        for rank, (_, connection) in enumerate(members):
            try:
                connection.send((rank, size, self._runs, [home, *sys.path], payload))
            except OSError:  # died while idle
                self._replace(rank)
                self._members[rank][1].send((rank, size, self._runs, [home, *sys.path], payload))
        return self._collect(size, timeout_seconds)

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
        self._members.clear()
        self._server.close()

    def _collect(self, size: int, timeout_seconds: float) -> list[Any]:
        pending = {self._members[rank][1]: rank for rank in range(size)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_seconds
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):
                    process = self._members[rank][0]
                    process.join(GRACE_SECONDS)
                    succeeded, value = False, f"the process died (exit code {process.exitcode})"
                    self._replace(rank)
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank} of {size}:\n{value}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                for rank in pending.values():
                    failures.append(f"rank {rank} of {size}: did not end and was replaced")
                    self._replace(rank)
                pending.clear()
        if failures:
            raise WorkersFailed("\n\n".join(failures))
        return [results[rank] for rank in range(size)]

    def _start(self) -> tuple[Any, Connection]:
        """A worker that serves already: a test's own deadline must not count the start of a process."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._server.port), daemon=True)
        process.start()
        theirs.close()
        ours.recv()
        return process, ours

    def _replace(self, rank: int) -> None:
        process, connection = self._members[rank]
        connection.close()
        process.kill()
        process.join()
        self._members[rank] = self._start()


def _serve(connection: Connection, port: int) -> None:
    import torch

    from dilatant.comm.store.store import connect

    torch.set_num_threads(1)
    store = connect("127.0.0.1", port, TOKEN, on_one_machine=True)
    connection.send("ready")
    while True:
        try:
            rank, size, run, path, payload = connection.recv()
        except EOFError:
            return
        sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
        importlib.invalidate_caches()
        try:
            function, args = pickle.loads(payload)
            value = function(Worker(rank, size, store.prefixed(f"run{run}")), *args)
            answer = pickle.dumps((True, value))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
