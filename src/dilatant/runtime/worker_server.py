"""The server that workers of our own come from, forked in a moment. Imports no torch itself, so it can start first."""

from __future__ import annotations

import signal

from dilatant.data import workers

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
    workers.warm_up(PRELOAD)


def heed_launcher() -> None:
    """In a worker: SIGTERM is for it again, which its launcher sends when it is asked to stop; Ctrl-C is not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
