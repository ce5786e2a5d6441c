"""Launching: a function on every rank, in workers of our own or as one worker of torchrun, Slurm or Kubernetes.

Who starts workers holds their store and watches them, so it can tell the others when one dies; under an outer launcher
rank 0 holds it. The error that is reported first is that of the worker that failed first for a reason of its own.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from dilatant.comm.errors import CommAborted, CommTimeout
from dilatant.comm.fork_server import (
    NO_GUARD,
    NO_GUARD_EXIT,
    heed_launcher,
    own_folder,
    remove_behind_parent,
    warm_up,
)
from dilatant.comm.rendezvous import announce_failure
from dilatant.comm.store import launcher_store as store_of_launcher
from dilatant.comm.store.server import StoreServer
from dilatant.comm.store.store import Store, connect
from dilatant.comm.store.token import fresh_token
from dilatant.config.environment import chooses_threads, place_from, prepare_cuda
from dilatant.config.errors import UserError

GRACE_SECONDS = 5.0
"""What workers have to end by themselves after one has died or hangs; then nothing they could save is of use."""
NEWCOMER_SECONDS = 0.2
"""Between two looks for ranks that are to be started again."""
START_SECONDS = 300.0
"""What rank 0 has to be there, where nobody says otherwise."""
SAVE_SECONDS = 60.0
"""What they have after one has raised an error: all of them may be saving their parts of the last step."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What the launched function is told. store: of all ranks, for `Comm`; None for a single one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    store: Store | None


def local_worker() -> Worker:
    """This process as the only rank: it has no store, and communication opens no socket."""
    return worker_here(0, 1, 0, 1, None)


class WorkerFailed(RuntimeError):
    """A worker ended the run; the message begins with its own error and rank, `details` are its traceback.
    killed_by: the signal that ended it, if one did. exit_code: what a scheduler should see."""

    def __init__(
        self, message: str, details: str = "", killed_by: int | None = None, exit_code: int = 1
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.details = details
        self.killed_by = killed_by


@dataclass(frozen=True, slots=True)
class _Start:
    """What a worker of ours is started with. folder: of the launcher, to remove when that was killed."""

    rank: int
    size: int
    port: int
    token: bytes
    payload: bytes
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
    """`function(worker, *args)` on every rank; what each rank returned, or only this one's under an outer launcher.

    An outer launcher's variables decide how many ranks there are; without them `num_workers` are started here.
    Function (of module level), arguments and results are pickled between our own processes. Ctrl-C does not reach
    these: it is for us. started: called when all of them run. timeout_seconds: what rank 0 has to be there
    under an outer launcher. Raises UserError or WorkerFailed with the first error.
    """
    place = place_from()
    if place is None:
        return launch_local(function, num_workers, *args, started=started)
    prepare_cuda()
    with store_of_launcher.joined(place, timeout_seconds) as store:
        worker = worker_here(
            place.rank, place.size, place.local_rank, place.local_size, store, started_here=False
        )
        return [_run_here(function, worker, args)]


Newcomers = Callable[[], Sequence[tuple[int, tuple[Any, ...]]]]
"""Ranks whose processes have ended, to be started again, with what the function is given there."""


def launch_local(
    function: Callable[..., Any],
    num_workers: int,
    *args: Any,
    started: Callable[[], None] = lambda: None,
    newcomers: Newcomers | None = None,
) -> list[Any]:
    """As `launch`, always in `num_workers` processes of our own (one: this process).

    newcomers: where the workers see for themselves who of them is gone. Then a loss is an error only when nobody is
    left, the results are those of the ranks that had some, and this is asked now and then for ranks to start again.
    """
    if num_workers < 1:
        raise UserError(f"cannot start {num_workers} workers")
    if num_workers == 1 and newcomers is None:
        return [_run_here(function, local_worker(), args)]
    payload = _pickled(function, args)  # before anything is started
    context = multiprocessing.get_context("forkserver")
    warm_up()
    folder = own_folder()
    token = fresh_token()
    server = StoreServer("127.0.0.1", 0, token)
    workers: dict[int, tuple[Any, Connection]] = {}

    def begin(rank: int, payload: bytes) -> Connection:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve,
            args=(theirs, _Start(rank, num_workers, server.port, token, payload, folder)),
            name=f"dilatant-{rank}",
        )
        process.start()
        theirs.close()
        workers[rank] = process, ours
        return ours

    def begin_again() -> dict[Connection, int]:
        assert newcomers is not None
        return {begin(rank, _pickled(function, theirs)): rank for rank, theirs in newcomers()}

    try:
        store = connect("127.0.0.1", server.port, token, on_one_machine=True)
        for rank in range(num_workers):
            begin(rank, payload)
        started()
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


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What workers import and run. Raises UserError when they could not."""
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
    """`function` in this process, with failures as `launch` raises them."""
    try:
        return function(worker, *args)
    except UserError:
        raise
    except Exception as error:
        report = _report(worker.rank, error)
        if not report.follows and worker.store is not None:
            with contextlib.suppress(Exception):  # the error itself is what counts
                announce_failure(worker.store, report.message)
        raise WorkerFailed(report.message, report.details) from error


def worker_here(
    rank: int, size: int, local_rank: int, local_size: int, store: Store | None, started_here: bool = True
) -> Worker:
    """This process as a rank; chooses its device, and how many threads it computes in. Raises UserError."""
    prepare_cuda()
    if torch.cuda.is_available():
        device = torch.device("cuda", _gpu_index(local_rank, torch.cuda.device_count(), started_here))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        if not chooses_threads():
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    return Worker(rank, size, local_rank, device, store)


def _gpu_index(local_rank: int, visible: int, started_here: bool) -> int:
    """Which of the visible GPUs is a rank's: the only one where an outer launcher shows each task its own.

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
    """Collect what the workers return; after the first failure tell the others, and wait for them a little, unless
    they survive it. begin_again: starts workers again, and gives their connections and ranks."""
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
                    deadline = time.monotonic() + GRACE_SECONDS  # the run is over, for newcomers as well
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
    if survives:  # who was killed says less than who was told why
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
    threading.Thread(
        target=_end_with_launcher, args=(start.folder,), name="dilatant-launcher", daemon=True
    ).start()
    heed_launcher()
    try:
        store = connect("127.0.0.1", start.port, start.token, on_one_machine=True)
        worker = worker_here(start.rank, start.size, start.rank, start.size, store)
        function, args = pickle.loads(start.payload)
        answer: Any = (function(worker, *args),)
    except BaseException as error:
        answer = _report(start.rank, error)
    try:
        connection.send_bytes(pickle.dumps(answer))
    except OSError:  # the launcher is gone
        remove_behind_parent(start.folder)
    connection.close()


def _end_with_launcher(folder: str | None) -> None:
    """When the launcher is gone, communication ends by itself; this ends a rank that does not notice."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    time.sleep(GRACE_SECONDS)
    remove_behind_parent(folder)
    os._exit(1)


def _report(rank: int, error: BaseException) -> _Report:
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    prefix = "" if isinstance(error, UserError) or text.startswith("rank ") else f"rank {rank}: "
    follows = isinstance(error, CommAborted)
    # What an error of ours says about another one is in the message; the other one's trace tells where it arose.
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
