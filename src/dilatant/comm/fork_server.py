"""Fork server: the process from which worker processes are forked quickly. Imports no torch, so it can start first.

Workers are never forked from the caller: a process that runs torch has threads, and its fork may hang.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from dilatant.comm.temporary import OWNER, TemporaryFolder, short_temporary_folder
from dilatant.config.environment import without_working_folder
from dilatant.config.errors import UserError

RANK_PRELOAD = ("dilatant.training.run", "dilatant.schedule.loaded_kernels")
"""Modules that a rank needs; their imports dominate its start-up, and the server does them once."""


SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux in bytes."""
NO_GUARD_EXIT = 78
NO_GUARD = (
    'the script that started this has no `if __name__ == "__main__":` line; processes that import it must not run it '
    "again: put what it does below that line"
)


def warm_up(preload: Sequence[str] = RANK_PRELOAD) -> None:
    """Start the fork server; its imports run in parallel to the caller.

    The server and its workers block signals to the whole process group (Ctrl-C in a terminal, SIGTERM from `timeout` or
    Slurm), which only the caller handles. Nothing is imported from the caller's working directory. Raises UserError if
    no temporary folder has a path short enough for a socket.
    """
    require_main_guard()
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) == "<stdin>":  # not a file, but workers would try to open it
        del main.__file__
    _choose_folder()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    with without_working_folder():
        resource_tracker.ensure_running()  # starting it unblocks both signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    folder = multiprocessing_folder()
    if folder is not None and not Path(folder, OWNER).exists():
        util.Finalize(None, TemporaryFolder(path=folder).close, exitpriority=-101)


def require_main_guard() -> None:
    """Exit with NO_GUARD_EXIT if this process is a worker that is importing the user's script, which calls this package
    at its top level. The process that started it then reports NO_GUARD."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(NO_GUARD_EXIT)


def _choose_folder() -> None:
    """Make multiprocessing create its folder (mode 0700) where its socket's path fits. Raises UserError."""
    with short_temporary_folder():
        folder = util.get_temp_dir()
    if len(os.fsencode(folder)) + len("/listener-12345678") > SOCKET_PATH_BYTES:
        raise UserError(f"the path of {folder} is too long for sockets in it; set TMPDIR to a shorter one")


def multiprocessing_folder() -> str | None:
    """Return the folder that multiprocessing made for this process, for `remove_orphaned_folder`; None in a process
    started by multiprocessing, which shares its parent's folder."""
    return util.get_temp_dir() if multiprocessing.parent_process() is None else None


def remove_orphaned_folder(folder: str | None, seconds: float = 1.0) -> None:
    """In a worker whose parent seems gone: remove the parent's `multiprocessing_folder`, which a killed parent
    leaves behind. If the parent still lives after `seconds`, keep the folder, from which the parent may start other
    workers."""
    parent = multiprocessing.parent_process()
    if folder is None or parent is None:
        return
    parent.join(seconds)
    if not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def end_with_launcher(folder: str | None, grace_seconds: float = 0.0) -> None:
    """In a worker: exit when the launcher has exited, `grace_seconds` later, and remove the orphaned `folder`."""

    def watch() -> None:
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        launcher.join()
        time.sleep(grace_seconds)
        remove_orphaned_folder(folder)
        os._exit(1)

    threading.Thread(target=watch, name="dilatant-launcher", daemon=True).start()


def heed_launcher() -> None:
    """In a worker: unblock SIGTERM, which the launcher sends to stop it, and ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
