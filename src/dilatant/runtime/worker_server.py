"""The server that workers of our own come from, forked in a moment. Imports no torch itself, so it can start first."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver

PRELOAD = (
    "dilatant.runtime.pipeline",
    "dilatant.runtime.trainer",
    "dilatant.schedule.assign_kernels",
    "dilatant.schedule.kernels",
)


def warm_up(ignore_interrupts: bool = False) -> None:
    """Start the server that workers come from; its imports go on beside what the caller does.

    Imports are the bulk of a worker's start; the server does them once. ignore_interrupts: Ctrl-C, which a terminal
    sends to all of a command's processes, is left to the caller; for its main thread.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    if not ignore_interrupts:
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server and its workers inherit this
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
