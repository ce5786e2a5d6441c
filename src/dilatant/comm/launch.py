"""Launch: run a function on every rank, in new worker processes or as one task of torchrun, Slurm or Kubernetes.

The process that starts workers hosts their store and watches them, so it can notify the others when one dies; under an
outer launcher rank 0 hosts the store. The error reported first is that of the first worker that failed by itself.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dilatant.comm.errors import CommAborted, CommTimeout, WorkerFailed
from dilatant.comm.fork_server import (
    NO_GUARD,
    NO_GUARD_EXIT,
    end_with_launcher,
    heed_launcher,
    multiprocessing_folder,
    remove_orphaned_folder,
    warm_up,
)
from dilatant.comm.rendezvous import announce_failure
from dilatant.comm.store import launcher_store as store_of_launcher
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import Store, connect
from dilatant.comm.store.token import fresh_token
from dilatant.config.environment import chooses_threads, place_from, prepare_torch
from dilatant.config.errors import UserError

GRACE_SECONDS = 5.0
"""Time that workers have to exit after one has died or hangs; they have nothing useful left to save."""
NEWCOMER_SECONDS = 0.2
"""Interval of checks for ranks to restart."""
START_SECONDS = 300.0
"""Default time limit for rank 0 to be reachable."""
SAVE_SECONDS = 60.0
"""Time that workers have to exit after one has raised an error: all may be saving their parts of the last step."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Rank and device of this process, for the launched function. store: shared by all ranks; None for one rank."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: Store | None


def local_worker() -> Worker:
    """Return the worker of a single-rank run: it has no store, and communication opens no socket."""
    return worker_here(0, 1, 0, 1, None)


@dataclass(frozen=True, slots=True)
class _Start:
    """Start parameters of a worker. folder: the launcher's, removed by the worker if the launcher was killed."""

    rank: int
    size: int
    port: int
    token: bytes
    folder: str | None


@dataclass(frozen=True, slots=True)
class _Report:
    rank: int
    message: str
    details: str
    follows: bool = False
    is_user_error: bool = False
    loses_a_rank: bool = False
    killed_by: int | None = None


def launch(
    function: Callable[..., Any],
    num_workers: int,
    *args: Any,
    started: Callable[[], None] = lambda: None,
    timeout_seconds: float = START_SECONDS,
) -> list[Any]:
    """Run `function(worker, *args)` on every rank. Return each rank's result; under an outer launcher only this rank's.

    An outer launcher's variables give the number of ranks; without them `num_workers` processes are started. The
    function (of module level), arguments and results are pickled between these processes. Ctrl-C reaches only this
    process. started: called when all of them run. timeout_seconds: time limit for rank 0 to be reachable under an
    outer launcher. Raises UserError, or WorkerFailed with the first error.
    """
    place = place_from()
    if place is None:
        return launch_local(function, num_workers, *args, started=started)
    prepare_torch()
    with store_of_launcher.shared_store(place, timeout_seconds) as store:
        worker = worker_here(place.rank, place.size, place.local_rank, place.local_size, store, started_here=False)
        return [_run_here(function, worker, args)]


JoiningRanks = Callable[[], Sequence[tuple[int, tuple[Any, ...]]]]
"""Callback that returns the ranks whose processes ended and must restart, with the function's arguments."""


def launch_local(
    function: Callable[..., Any],
    num_workers: int,
    *args: Any,
    started: Callable[[], None] = lambda: None,
    newcomers: JoiningRanks | None = None,
) -> list[Any]:
    """Like `launch`, but always in `num_workers` new processes (one worker: in this process).

    newcomers: passed if the workers handle the loss of a rank themselves. Then only the loss of all ranks is an error,
    only ranks that finish return results, and this callback is polled for ranks to restart.
    """
    if num_workers < 1:
        raise UserError(f"cannot start {num_workers} workers")
    if num_workers == 1 and newcomers is None:
        return [_run_here(function, local_worker(), args)]
    payload = _pickled(function, args)  # before any process is started
    context = multiprocessing.get_context("forkserver")
    warm_up()
    folder = multiprocessing_folder()
    token = fresh_token()
    server = StoreServer("127.0.0.1", 0, token)
    workers: dict[int, tuple[Any, Connection]] = {}

    def begin(rank: int) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, _Start(rank, num_workers, server.port, token, folder)), name=f"dilatant-{rank}"
        )
        process.start()
        theirs.close()
        workers[rank] = process, ours
        return ours

    def begin_again() -> dict[Connection, int]:
        assert newcomers is not None
        again = {begin(rank): (rank, _pickled(function, theirs)) for rank, theirs in newcomers()}
        for connection, (_, payload) in again.items():
            _send(connection, payload)
        return {connection: rank for connection, (rank, _) in again.items()}

    try:
        store = connect("127.0.0.1", server.port, token, on_one_machine=True)
        connections = [begin(rank) for rank in range(num_workers)]
        started()
        for connection in connections:
            _send(connection, payload)
        results = _watch(workers, store, None if newcomers is None else begin_again)
        _join([process for process, _ in workers.values()], GRACE_SECONDS)
        return results
    finally:
        for process, connection in workers.values():
            if process.is_alive():
                process.kill()
            connection.close()
        _join([process for process, _ in workers.values()], GRACE_SECONDS)
        server.close()


def _send(connection: Connection, payload: bytes) -> None:
    """Send what a worker runs, once all workers run: each takes it only after it has imported the user's script, which
    they thus do at the same time. The end of a worker that takes nothing is noticed when its result is awaited."""
    with contextlib.suppress(OSError):
        connection.send_bytes(payload)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle what workers run. Raises UserError if workers could not import or unpickle it."""
    main = sys.modules["__main__"]
    if function.__module__ == "__main__" and not os.path.isfile(getattr(main, "__file__", None) or ""):
        raise UserError(
            f"several workers cannot run {function.__qualname__!r}: it is defined in a notebook, at a prompt or on "
            "standard input, which other processes cannot import; put it into a .py file and import it, or use one "
            "worker"
        )
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"several workers cannot run {getattr(function, '__qualname__', function)!r}: {error}; the function has to "
            "be at the top level of a module, and its arguments such that pickle takes them"
        ) from None


def _run_here(function: Callable[..., Any], worker: Worker, args: tuple[Any, ...]) -> Any:
    """Run `function` in this process; failures are raised in the same form as by `launch`."""
    try:
        return function(worker, *args)
    except UserError:
        raise
    except Exception as error:
        report = _report(worker.rank, error)
        if not report.follows and worker.store is not None:
            with contextlib.suppress(Exception):  # report the original error
                announce_failure(worker.store, report.message)
        raise WorkerFailed(report.message, report.details) from error


def worker_here(
    rank: int, size: int, local_rank: int, local_size: int, store: Store | None, started_here: bool = True
) -> Worker:
    """Set this process up as a rank: select its device and its number of threads. Raises UserError."""
    prepare_torch()
    if torch.cuda.is_available():
        device = torch.device("cuda", _gpu_index(local_rank, torch.cuda.device_count(), started_here))
        torch.cuda.set_device(device)
        # It plans anew, for 50 ms and more, for every new shape, and rows rarely have the shape of another.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        device = torch.device("cpu")
        if not chooses_threads():
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    return Worker(rank, size, local_rank, device, store)


def _gpu_index(local_rank: int, visible: int, started_here: bool) -> int:
    """Return the index of a rank's GPU among the visible ones; 0 if an outer launcher shows each task its own GPU.

    Raises UserError.
    """
    if local_rank >= visible and (started_here or visible > 1):
        raise UserError(
            f"rank {local_rank} of a machine needs a GPU of its own, but sees {visible}; start fewer ranks there, or "
            "let the launcher show each one its own (Slurm: --gpus-per-task=1)"
        )
    return local_rank % visible


def _watch(
    workers: Mapping[int, tuple[Any, Connection]],
    store: Store,
    begin_again: Callable[[], dict[Connection, int]] | None = None,
) -> list[Any]:
    """Collect the workers' results. After the first failure, notify the others and wait for them for a limited time,
    unless they survive it. begin_again: restarts workers and returns their connections and ranks."""
    survives = begin_again is not None
    pending = {connection: rank for rank, (_, connection) in workers.items()}
    results: dict[int, Any] = {}
    reports: list[_Report] = []
    deadline: float | None = None
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if begin_again is not None and deadline is None:
            pending |= begin_again()
            left = NEWCOMER_SECONDS
        ready = wait(list(pending), timeout=left)
        if not ready:
            if deadline is None:
                continue
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                outcome = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                outcome = _death(rank, workers[rank][0])
            if not isinstance(outcome, _Report):
                results[rank] = outcome[0]
                if survives and outcome[0] is not None:
                    deadline = time.monotonic() + GRACE_SECONDS  # the run is over, also for restarted ranks
                continue
            if not survives and (not reports or outcome.loses_a_rank):
                began = announce_failure(store, outcome.message)
                seconds = SAVE_SECONDS if not outcome.loses_a_rank else GRACE_SECONDS if began else 0.0
                deadline = min(time.monotonic() + seconds, math.inf if deadline is None else deadline)
            elif survives and not outcome.loses_a_rank:
                deadline = time.monotonic() + GRACE_SECONDS
            reports.append(outcome)
    if not reports or (survives and any(result is not None for result in results.values())):
        return [results[rank] for rank in sorted(results)]
    telling = [report for report in reports if not report.follows]
    if survives:  # prefer the report of a rank that knows the cause over that of a killed rank
        telling.sort(key=lambda report: (not report.is_user_error, report.loses_a_rank))
    first = (telling or reports)[0]
    if first.is_user_error:
        raise UserError(first.message)
    raise WorkerFailed(first.message, first.details, first.killed_by)


def _death(rank: int, process: Any) -> _Report:
    process.join(GRACE_SECONDS)
    code = process.exitcode
    if code == NO_GUARD_EXIT:
        return _Report(rank, NO_GUARD, "", is_user_error=True)
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (often the machine ran out of memory)"
    else:
        how = f"ended with exit code {code}"
    killed_by = -code if code is not None and code < 0 else None
    return _Report(rank, f"rank {rank} {how}", "", loses_a_rank=True, killed_by=killed_by)


def _serve(connection: Connection, start: _Start) -> None:
    end_with_launcher(start.folder, GRACE_SECONDS)  # also a rank that does not notice the abort of communication
    heed_launcher()
    try:
        payload = connection.recv_bytes()
        store = connect("127.0.0.1", start.port, start.token, on_one_machine=True)
        worker = worker_here(start.rank, start.size, start.rank, start.size, store)
        function, args = pickle.loads(payload)
        answer: Any = (function(worker, *args),)
    except BaseException as error:
        answer = _report(start.rank, error)
    try:
        connection.send_bytes(pickle.dumps(answer))
    except OSError:  # the launcher has exited
        remove_orphaned_folder(start.folder)
    connection.close()


def _report(rank: int, error: BaseException) -> _Report:
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    prefix = "" if isinstance(error, UserError) or text.startswith("rank ") else f"rank {rank}: "
    follows = isinstance(error, CommAborted)
    # Errors about another rank are complete in the message; that rank's own traceback shows the origin.
    return _Report(
        rank,
        prefix + text,
        "" if follows else "".join(traceback.format_exception(error.__cause__ or error, chain=False)),
        follows=follows,
        is_user_error=isinstance(error, UserError),
        loses_a_rank=isinstance(error, CommTimeout),
    )


def _join(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
