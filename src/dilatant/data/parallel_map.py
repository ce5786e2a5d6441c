"""Parallel map over pieces (runs of samples or files), in this process or in several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice, tee
from typing import TypeVar

from dilatant.data.workers.ordered_map import TASK_SECONDS, WorkerPool

TRIAL_SECONDS = 1.0
WORTH_SECONDS = 5.0
"""Seconds of remaining work from which worker processes pay off; they take seconds to start."""
FEW = 8
"""Number of pieces up to which no worker processes are started."""

IndexRange = tuple[int, int]
"""The first index, and the index after the last one."""
Progress = Callable[[int, int], None]
"""Callback (done, total)."""
R = TypeVar("R")


def piece_bounds(total: int, length: int) -> Iterator[IndexRange]:
    """Cut `range(total)` into pieces of a length; the last one may be shorter."""
    return ((start, min(start + length, total)) for start in range(0, total, length))


def map_ranges(
    job: Callable[[IndexRange], R],
    pieces: Iterator[IndexRange],
    total: int,
    named: Callable[[IndexRange], str],
    workers: int | None,
    piece_seconds: float = TASK_SECONDS,
) -> Iterator[tuple[IndexRange, R]]:
    """Apply a job to every piece and yield the results in order.

    job: picklable. named: returns the name of a piece for messages. workers: number of processes; 0 works in this
    process; None starts in this process and moves to all available cores if enough work remains. piece_seconds:
    time limit for one piece in a worker process. Raises any UserError of the job.
    """
    head = list(islice(pieces, FEW + 1))
    pieces = chain(head, pieces)
    if len(head) <= FEW:
        workers = 0
    if workers is None:
        began = time.monotonic()
        for piece in pieces:
            yield piece, job(piece)
            spent = time.monotonic() - began
            if spent > TRIAL_SECONDS and spent * (total - piece[1]) / piece[1] > WORTH_SECONDS:
                break
        else:
            return
        cores = len(os.sched_getaffinity(0))
        workers = cores if cores > 1 else 0
    if not workers:
        yield from ((piece, job(piece)) for piece in pieces)
        return
    begun, sent = tee(pieces)
    pool: WorkerPool[IndexRange, R] = WorkerPool(job, workers, named=named, task_seconds=piece_seconds)
    try:
        yield from zip(begun, pool.map(sent, ahead=4 * workers))
    finally:
        pool.close()
