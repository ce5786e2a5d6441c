"""The server that workers of our own come from, forked in a moment. Imports no torch itself, so it can start first."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

PRELOAD = (
    "dilatant.runtime.pipeline",
    "dilatant.runtime.trainer",
    "dilatant.schedule.assign_kernels",
    "dilatant.schedule.kernels",
)


def warm_up() -> None:
    """Start the server that workers come from; its imports go on beside what the caller does.

    Imports are the bulk of a worker's start; the server does them once.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()
